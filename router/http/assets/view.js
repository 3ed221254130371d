// Figures, nodes and the close-up of one hand-off. Names are set as text: whatever a node calls itself stays text.

export const byId = (id) => document.getElementById(id);
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
export const ms = (value) => (value === null || value === undefined ? "–" : value < 9.95 ? value.toFixed(1) : value.toFixed(0));
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

// --- figures

const RATE_OVER_S = 3;
const LATELY_S = 60;
let samples = [];
let quiet_timer;

export function resetFigures() {
  samples = [];
}

export function drawFigures(state) {
  const { totals, now_s } = state;
  const ttfts = [...state.requests.values()]
    .filter((request) => request.first_s !== null && now_s - request.first_s < LATELY_S)
    .map((request) => (request.timings ? request.timings.ttft_ms : (request.first_s - request.arrival_s) * 1e3))
    .sort((a, b) => a - b);
  byId("ttft").textContent = ms(quantile(ttfts, 0.5));
  byId("ttft-more").textContent = `p95 ${ms(quantile(ttfts, 0.95))}${ttfts.length ? " ms" : ""}`;
  byId("itl").textContent = ms(totals.itl_p50_ms);
  byId("itl-more").textContent = `p95 ${ms(totals.itl_p95_ms)}${totals.itl_p95_ms === null ? "" : " ms"}`;
  byId("running").textContent = totals.num_running;
  const ends = [`${totals.num_finished} finished`];
  if (totals.num_failed) ends.push(`${totals.num_failed} failed`);
  if (totals.num_left) ends.push(`${totals.num_left} left`);
  byId("done").textContent = ends.join(" · ");
  addSample(now_s, totals);
  clearTimeout(quiet_timer);
  quiet_timer = setTimeout(() => addSample(now_s + RATE_OVER_S + 0.2, totals), (RATE_OVER_S + 0.2) * 1e3);
}

function addSample(now_s, { num_tokens, num_kv_bytes }) {
  const before = samples.findLast((sample) => now_s - sample.now_s >= RATE_OVER_S) ?? samples[0];
  const over_s = before ? now_s - before.now_s : 0;
  const rate = (now, then) => (over_s > 0 ? (now - then) / over_s : 0);
  const sample = { now_s, num_tokens, num_kv_bytes, tokens: rate(num_tokens, before?.num_tokens), bytes: rate(num_kv_bytes, before?.num_kv_bytes) };
  samples.push(sample);
  samples = samples.filter(({ now_s: then_s }) => now_s - then_s < LATELY_S);
  byId("rate").textContent = sample.tokens < 99.5 ? sample.tokens.toFixed(1).replace(".0", "") : sample.tokens.toFixed(0);
  byId("transfer").textContent = (sample.bytes / 1e6).toFixed(sample.bytes < 1e7 ? 1 : 0);
  drawLine("rate-line", now_s, "tokens");
  drawLine("transfer-line", now_s, "bytes");
}

function drawLine(id, now_s, name) {
  const top = Math.max(...samples.map((sample) => sample[name]), 1e-9);
  const span_s = Math.max(10, now_s - samples[0].now_s);
  const points = samples.map((sample) => `${(100 - (now_s - sample.now_s) / span_s * 100).toFixed(1)},${(19 - sample[name] / top * 18).toFixed(1)}`);
  byId(id).firstElementChild.setAttribute("points", points.join(" "));
}

// --- nodes

const POOL = ["held", "cached", "quarantined"];
const cards = new Map();

export function drawNodes(nodes) {
  for (const [epoch, card] of cards) {
    if (!nodes.has(epoch)) {
      card.element.remove();
      cards.delete(epoch);
    }
  }
  for (const [epoch, node] of nodes) {
    if (!cards.has(epoch)) cards.set(epoch, makeCard(node));
    fillCard(cards.get(epoch), node);
  }
  byId("no-nodes").hidden = nodes.size > 0;
}

function makeCard(node) {
  const element = make("li");
  const top = make("div", "node-top");
  const used = make("span", "used");
  top.append(make("b", "", node.name), make("span", "role", node.role), used);
  const pool = make("div", "pool");
  pool.setAttribute("role", "img");
  const parts = Object.fromEntries(POOL.map((kind) => [kind, make("i", kind)]));
  pool.append(...Object.values(parts));
  const more = make("div", "node-more");
  element.append(top, pool, more);
  const role = { prefill: 0, decode: 1 }[node.role];
  element.dataset.order = `${role} ${node.name}`;
  const next = [...byId("nodes").children].find((other) => other.dataset.order > element.dataset.order);
  byId("nodes").insertBefore(element, next ?? null);
  return { element, used, pool, parts, more };
}

function fillCard({ used, pool, parts, more }, node) {
  for (const kind of POOL) parts[kind].style.width = `${100 * node[`num_${kind}`] / node.num_blocks}%`;
  used.textContent = `${node.num_held} / ${node.num_blocks} blocks`;
  const blocks = [...POOL, "free"].map((kind) => `${node[`num_${kind}`]} ${kind}`).join(", ");
  pool.setAttribute("aria-label", `KV pool of ${node.num_blocks} blocks: ${blocks}`);
  pool.title = blocks;
  const said = [`${node.num_running} running`, `${node.num_waiting} waiting`, `${node.tokens_per_s.toFixed(0)} tokens/s`];
  if (node.num_transfers) said.push(`${node.num_transfers} in transfer`);
  if (node.num_quarantined) said.push(`${node.num_quarantined} quarantined`);
  if (node.draining) said.push("draining");
  more.textContent = said.join(" · ");
}

// --- one hand-off

const OUTCOMES = { stop: "finished", length: "finished, at its length", LEFT: "cancelled or out of time" };
export const outcomeOf = (request) => (request.ended_s === null ? "running" : OUTCOMES[request.outcome] ?? `failed: ${request.outcome}`);

/** The segments of a request that has ended, in ms since it came: [lane, kind, name, from, to]. */
export function segmentsOf(request) {
  const times = request.timings;
  const first = times.ttft_ms;
  const total = times.total_ms;
  const segments = [];
  let at = 0;
  const add = (lane, kind, name, length) => {
    if (length > 0) segments.push({ lane, kind, name, from: at, to: at + length });
    at += Math.max(0, length);
  };
  const whole = !request.prefill;
  const p = whole ? "decode" : "prefill";
  add("router", "route", "route", times.route_ms);
  add(p, "queue", whole ? "queue" : "P queue", times.prefill_queue_ms);
  add(p, "prefill", "prefill", times.prefill_ms);
  add("router", "route", "first token out", Math.min(times.first_token_out_ms, Math.max(0, first - at)));
  if (!times.second_token_ms) {
    at = Math.max(at, first);
    if (first) add("decode", "decode", "decode", total - at);
    return segments;
  }
  at = first;
  add("transfer", "exposed", "exposed transfer", times.exposed_transfer_ms);
  add("decode", "queue", "D queue", times.decode_queue_ms);
  add("decode", "decode", "first decode step", times.first_decode_step_ms);
  add("decode", "decode", "decode", total - at);
  if (request.handoff) {
    const landed = Math.min(times.second_token_ms - times.decode_queue_ms - times.first_decode_step_ms, first + times.exposed_transfer_ms);
    const from = Math.max(0, landed - request.handoff.report.transfer_ms);
    const to = Math.min(landed, first);
    if (to > from) segments.push({ lane: "transfer", kind: "hidden-transfer", name: "hidden transfer", from, to });
  }
  return segments;
}

const bytes = (number) => (number < 1e6 ? `${(number / 1e3).toFixed(0)} kB` : `${(number / 1e6).toFixed(1)} MB`);

export function drawCloseup(number, request) {
  const times = request.timings;
  const report = request.handoff?.report;
  const about = [`Request ${number}: ${request.num_prompt_tokens} prompt tokens`, `${request.num_tokens} out`, outcomeOf(request)];
  if (report) about.push(`${report.kv_blocks} blocks, ${bytes(report.kv_bytes)} over ${report.transport}`);
  byId("closeup-about").textContent = about.join(" · ");
  const segments = segmentsOf(request);
  const end = (times.second_token_ms || times.ttft_ms || times.total_ms) * 1.04 || 1;
  const at = (value) => `${Math.min(100, 100 * value / end)}%`;
  const names = { router: "router", prefill: request.prefill, transfer: "KV", decode: request.decode };
  const lanes = Object.entries(names).filter(([, name]) => name).map(([lane, name]) => {
    const row = make("div", "lane");
    const label = make("span", "", name);
    label.title = name;
    const track = make("div", "track");
    for (const segment of segments.filter((one) => one.lane === lane && one.from < end)) {
      const bar = make("i", segment.kind);
      bar.style.left = at(segment.from);
      bar.style.width = `${Math.min(100 - 100 * segment.from / end, 100 * (segment.to - segment.from) / end)}%`;
      bar.title = `${segment.name}: ${ms(segment.to - segment.from)} ms`;
      track.append(bar);
    }
    row.append(label, track);
    return row;
  });
  const mark = (name, value) => {
    const row = make("div", "lane");
    const scale = make("div", "track marks");
    if (value) {
      const text = make("em", value / end > 0.8 ? "late" : value / end < 0.2 ? "early" : "", `${name} ${ms(value)} ms`);
      text.style.left = at(value);
      scale.append(text);
      for (const { lastElementChild: track } of lanes) {
        const line = make("u");
        line.style.left = at(value);
        track.append(line);
      }
    }
    row.append(make("span"), scale);
    return row;
  };
  byId("closeup").replaceChildren(mark("first token", times.ttft_ms), ...lanes, mark("second token", times.second_token_ms));
  const listed = segments.filter(({ name }) => name !== "decode").sort((a, b) => a.from - b.from).map(({ kind, name, from, to }) => [kind, name, to - from]);
  byId("closeup-times").replaceChildren(...listed.map(([kind, name, value]) => {
    const entry = make("div");
    entry.append(make("dt", kind, name), make("dd", "", `${ms(value)} ms`));
    return entry;
  }));
}
