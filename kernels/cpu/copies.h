// Copies of many pieces in one call, past the caches: what is copied is read by another process, later, and a store that
// bypasses the cache need not fetch the line that it overwrites.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace kvrelay {

struct CopyPiece {
  const char* source;
  char* target;
  uint64_t size;
};

#if defined(__AVX512F__)
constexpr uint64_t kStreamBytes = 64;
inline void stream(char* target, const char* source) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
}
#elif defined(__AVX__)
constexpr uint64_t kStreamBytes = 32;
inline void stream(char* target, const char* source) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
#endif

inline void copy_pieces(const CopyPiece* pieces, int64_t num_pieces) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    const char* source = pieces[i].source;
    char* target = pieces[i].target;
    uint64_t left = pieces[i].size;
#if defined(__AVX512F__) || defined(__AVX__)
    constexpr uint64_t kStep = 4 * kStreamBytes, kLeast = 2048;  // less than that is copied as well through the caches
    if (left >= kLeast) {
      const uint64_t head = -reinterpret_cast<uintptr_t>(target) % kStreamBytes;
      std::memcpy(target, source, head);
      source += head, target += head, left -= head;
      for (; left >= kStep; source += kStep, target += kStep, left -= kStep) {
        for (uint64_t at = 0; at < kStep; at += kStreamBytes) stream(target + at, source + at);
      }
    }
#endif
    std::memcpy(target, source, left);
  }
#if defined(__AVX512F__) || defined(__AVX__)
  _mm_sfence();  // whoever is told of the copy afterwards sees it
#endif
}

}  // namespace kvrelay
