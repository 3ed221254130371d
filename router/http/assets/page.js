// Ties feed, figures, nodes, timeline and prompt box together.

import { follow } from "./feed.js";
import { setUpPrompt } from "./prompt.js";
import { Timeline } from "./timeline.js";
import { byId, drawCloseup, drawFigures, drawNodes, resetFigures } from "./view.js";

let about = { model: "", chat: true };
let requests = new Map();
let isChosen = false; // by a person: it stays, whatever ends meanwhile

const timeline = new Timeline((number) => {
  const request = requests.get(number);
  isChosen = request.ended_s !== null;
  if (isChosen) drawCloseup(number, request);
});

function followLatest(changed) {
  if (isChosen && requests.has(timeline.selected)) return;
  isChosen = false;
  const ended = Object.entries(changed).filter(([, request]) => request?.timings?.ttft_ms);
  ended.sort(([, a], [, b]) => a.ended_s - b.ended_s);
  if (ended.length) drawCloseup(...ended.at(-1));
}

setUpPrompt(() => about);
follow({
  about(said) {
    about = said;
    byId("model").textContent = said.model;
  },
  state(word) {
    const state = byId("state");
    if (state.dataset.state === word) return;
    state.dataset.state = word;
    state.textContent = word === "lost" ? "connection lost, trying again" : word;
  },
  reset() {
    resetFigures();
    timeline.reset();
  },
  change(state, change) {
    requests = state.requests;
    drawFigures(state);
    if (Object.keys(change.nodes).length) drawNodes(state.nodes);
    timeline.update(state, change.requests);
    followLatest(change.requests);
  },
});
