// Requests as bars in lanes, on a plane that moves to the left as time goes by. While nothing runs it stands still.

import { byId, make, ms, outcomeOf, segmentsOf } from "./view.js";

const LANE_PX = 18;
const GAP_S = 0.02;
const stillMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class Timeline {
  /** `onSelect(number)`: a person has chosen a request. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.box = byId("timeline");
    this.plane = byId("plane");
    this.bars = new Map(); // number -> {element, request, lane}, in order of their numbers
    this.selected = null;
    this.window_s = 15;
    this.clock = { now_s: 0, at_ms: performance.now() };
    this.frame = null;
    this.lanes = []; // when the last bar of each one ends; Infinity while it runs
    byId("window").addEventListener("change", (event) => {
      this.window_s = Number(event.target.value);
      this.layOut();
    });
    this.box.addEventListener("click", (event) => {
      const bar = event.target.closest(".bar");
      if (bar) this.select(bar.dataset.number);
    });
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.layOut()).observe(this.box);
    this.layOut();
  }

  reset() {
    this.plane.replaceChildren();
    this.bars.clear();
    this.lanes = [];
    this.selected = null;
    this.origin_s = 0;
  }

  update(state, changed) {
    this.clock = { now_s: state.now_s, at_ms: performance.now() };
    const numbers = Object.keys(changed).sort((a, b) => a - b);
    for (const number of numbers) {
      const request = changed[number];
      if (request === null) this.remove(number);
      else this.put(number, request);
    }
    byId("no-requests").hidden = this.bars.size > 0;
    this.box.hidden = byId("axis").hidden = this.bars.size === 0;
    if (!this.scale) this.layOut();
    this.draw();
  }

  put(number, request) {
    let bar = this.bars.get(number);
    if (!bar) {
      bar = { element: make("div", "bar"), lane: this.takeLane(request) };
      bar.element.id = `request-${number}`;
      bar.element.dataset.number = number;
      bar.element.setAttribute("role", "option");
      bar.element.setAttribute("aria-selected", "false");
      bar.element.style.top = `${bar.lane * LANE_PX + 2}px`;
      this.plane.append(bar.element);
      this.bars.set(number, bar);
      this.plane.style.height = `${this.lanes.length * LANE_PX + 2}px`;
    }
    bar.request = request;
    const isRunning = request.ended_s === null;
    bar.element.classList.toggle("running", isRunning);
    this.lanes[bar.lane] = Math.max(isRunning ? Infinity : request.ended_s, this.lanes[bar.lane] === Infinity ? 0 : this.lanes[bar.lane]);
    bar.element.setAttribute("aria-label", label(number, request));
    bar.element.title = label(number, request);
    if (!isRunning) bar.element.replaceChildren(...endedParts(request));
    this.place(bar);
  }

  takeLane(request) {
    const free = this.lanes.findIndex((end_s) => end_s + GAP_S < request.arrival_s);
    if (free >= 0) return free;
    this.lanes.push(0);
    return this.lanes.length - 1;
  }

  remove(number) {
    this.bars.get(number)?.element.remove();
    this.bars.delete(number);
    if (this.selected === number) this.selected = null;
    // Lanes that nothing is in any more go: a burst does not leave a tall empty box.
    const used = Math.max(-1, ...[...this.bars.values()].map((bar) => bar.lane));
    if (used + 1 < this.lanes.length) {
      this.lanes.length = used + 1;
      this.plane.style.height = `${this.lanes.length * LANE_PX + 2}px`;
    }
  }

  now() {
    return this.clock.now_s + (this.isRunning() ? (performance.now() - this.clock.at_ms) / 1e3 : 0);
  }

  isRunning() {
    return this.lanes.includes(Infinity);
  }

  layOut() {
    this.width = this.box.clientWidth;
    this.scale = this.width / this.window_s;
    this.origin_s = this.now();
    for (const bar of this.bars.values()) this.place(bar);
    const labels = [...Array(5).keys()].map((i) => `−${this.window_s * (5 - i) / 5} s`);
    byId("axis").replaceChildren(...[...labels, "now"].map((text) => make("span", "", text)));
    this.draw();
  }

  place({ element, request }) {
    const end_s = request.ended_s ?? this.now();
    element.style.left = `${(request.arrival_s - this.origin_s) * this.scale}px`;
    element.style.width = `${Math.max(0, end_s - request.arrival_s) * this.scale}px`;
    if (request.ended_s === null) drawRunning(element, request, end_s);
  }

  draw() {
    const now_s = this.now();
    this.plane.style.transform = `translateX(${this.width - (now_s - this.origin_s) * this.scale}px)`;
    if (!this.isRunning()) return;
    for (const bar of this.bars.values()) if (bar.request.ended_s === null) this.place(bar);
    if (this.frame === null && !stillMotion.matches) {
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        this.draw();
      });
    }
  }

  select(number) {
    this.bars.get(this.selected)?.element.setAttribute("aria-selected", "false");
    this.selected = number;
    const { element } = this.bars.get(number);
    element.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", element.id);
    this.onSelect(number);
  }

  onKey(event) {
    const numbers = [...this.bars.keys()];
    const at = numbers.indexOf(this.selected);
    const last = numbers.length - 1;
    const next = {
      ArrowLeft: at < 0 ? last : at - 1, ArrowUp: at < 0 ? last : at - 1,
      ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last,
    }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.select(numbers[Math.max(0, Math.min(last, next))]);
  }
}

function label(number, request) {
  const way = request.prefill ? `${request.prefill} → ${request.decode}` : request.decode || "not placed";
  const parts = [`Request ${number}`, outcomeOf(request), way, `${request.num_tokens} tokens`];
  if (request.timings?.ttft_ms) parts.push(`TTFT ${ms(request.timings.ttft_ms)} ms`);
  return parts.join(", ");
}

function endedParts(request) {
  const total = request.timings.total_ms || 1;
  const parts = segmentsOf(request).map(({ kind, from, to }) => {
    const part = make("i", kind);
    part.style.left = `${100 * from / total}%`;
    part.style.width = `${100 * (to - from) / total}%`;
    return part;
  });
  if (!["stop", "length"].includes(request.outcome)) parts.push(make("i", "failed"));
  return parts;
}

/** What is known while it runs: the way to the first token in one piece, then decode. */
function drawRunning(element, request, now_s) {
  if (element.children.length !== 2) element.replaceChildren(make("i", "before-first"), make("i", "decode"));
  const [before, decode] = element.children;
  const whole = Math.max(1e-9, now_s - request.arrival_s);
  const share = 100 * ((request.first_s ?? now_s) - request.arrival_s) / whole;
  before.style.width = `${share}%`;
  decode.style.left = `${share}%`;
  decode.style.width = `${100 - share}%`;
}
