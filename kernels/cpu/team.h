// Threads that run one program together: all walk through its operations, share each one's tasks, and meet at its end.
//
// Tasks are claimed one by one, so a thread that is held up leaves the rest to the others. Who waits spins for some
// microseconds and then sleeps: an idle team uses no CPU.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

namespace kvrelay {

constexpr int kSpins = 1000;  // some 10 to 50 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that changes, and that one can wait for to change.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void change() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void wait_while(uint32_t seen) {
    for (int i = 0; i < kSpins; ++i) {
      if (value() != seen) return;
      pause();
    }
    num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (value() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void futex(int operation, uint32_t number) { syscall(SYS_futex, &value_, operation, number, nullptr, nullptr, 0); }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> num_sleeping_{0};
};

// Memory of one thread that keeps what it has grown to. Contents do not last.
class Scratch {
 public:
  ~Scratch() { free(memory_); }

  void* at_least(size_t num_bytes) {
    if (num_bytes > size_) {
      free(memory_);
      size_ = (num_bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

class Team;

// One thread's place in a run.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}

  int index() const { return index_; }
  Scratch& scratch() { return scratch_; }

  // Run `task(i)` for the numbers in [0, num_tasks) that this thread gets; then wait until all have been run.
  template <class Task>
  void share(int64_t num_tasks, const Task& task);

  // The same with `task(i, next)`: `next` is the number that this thread will get after i, so that it can ask for that
  // one's memory; one past the end if there is none, or too few tasks for a thread to take one in advance.
  template <class Task>
  void share_ahead(int64_t num_tasks, const Task& task);

 private:
  friend class Team;
  Team& team_;
  int index_;
  Scratch scratch_;
};

class Team {
 public:
  // The threads that it starts have this niceness; the calling one keeps its own.
  Team(int num_threads, int nice) : num_threads_(num_threads), nice_(nice) {
    for (int i = 0; i < num_threads; ++i) members_.push_back(std::make_unique<Member>(*this, i));
    threads_.resize(num_threads - 1);
    for (int i = 1; i < num_threads; ++i) {
      num_started_ += pthread_create(&threads_[i - 1], nullptr, &Team::serve, members_[i].get()) == 0;
      if (num_started_ < i) break;
    }
    num_threads_ = num_started_ + 1;
  }

  ~Team() {
    notice_fork();
    work_ = nullptr;
    begin_.change();
    for (int i = 0; i < num_started_; ++i) pthread_join(threads_[i], nullptr);
  }

  int num_threads() const { return num_threads_; }

  // Have every thread run `work`, the calling one among them. For one caller at a time.
  void run(const std::function<void(Member&)>& work) {
    notice_fork();
    work_ = &work;
    if (num_threads_ > 1) begin_.change();
    work(*members_[0]);
    meet();  // nobody looks at `work` any more
  }

 private:
  friend class Member;

  static void* serve(void* of) {
    Member& member = *static_cast<Member*>(of);
    Team& team = member.team_;
    if (team.nice_) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), team.nice_);
    for (uint32_t seen = 0;; ++seen) {
      team.begin_.wait_while(seen);
      if (!team.work_) return nullptr;
      (*team.work_)(member);
      team.meet();
    }
  }

  // Threads do not follow a fork: a child works alone.
  void notice_fork() {
    if (getpid() == process_) return;
    process_ = getpid();
    num_threads_ = 1;
    num_started_ = 0;
    num_arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
  }

  // Wait for all threads. The last one to come readies what the next operation counts with.
  void meet() {
    const uint32_t seen = met_.value();
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
      met_.wait_while(seen);
      return;
    }
    num_arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    if (num_threads_ > 1) met_.change();
  }

  int num_threads_;
  const int nice_;
  int num_started_ = 0;
  pid_t process_ = getpid();
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<pthread_t> threads_;
  const std::function<void(Member&)>* work_ = nullptr;
  alignas(64) Signal begin_;
  alignas(64) Signal met_;
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<int64_t> next_{0};  // task of the operation that all are at
};

template <class Task>
void Member::share(int64_t num_tasks, const Task& task) {
  for (int64_t i; (i = team_.next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
  team_.meet();
}

template <class Task>
void Member::share_ahead(int64_t num_tasks, const Task& task) {
  constexpr int64_t kFew = 4;  // a thread
  if (num_tasks < kFew * team_.num_threads_) return share(num_tasks, [&](int64_t i) { task(i, num_tasks); });
  const auto claim = [&] { return std::min(num_tasks, team_.next_.fetch_add(1, std::memory_order_relaxed)); };
  for (int64_t i = claim(), next; i < num_tasks; i = next) task(i, next = claim());
  team_.meet();
}

}  // namespace kvrelay
