// The router's feed: a state that changes are applied to, and the connection that brings them.

import { call, eventsOf } from "./key.js";

const SILENCE_MS = 25_000; // the router gives a sign of life every ten seconds

export const empty = () => ({ now_s: 0, nodes: new Map(), requests: new Map(), totals: null });

export function apply(state, change) {
  state.now_s = change.now_s;
  state.totals = change.totals;
  for (const kind of ["nodes", "requests"]) {
    for (const [name, entry] of Object.entries(change[kind])) {
      if (entry === null) state[kind].delete(name);
      else state[kind].set(name, entry);
    }
  }
}

/** Follow the feed for as long as the page is there. `on`: about(model), change(state, change), state(word). */
export async function follow(on) {
  for (let wait_ms = 500; ; wait_ms = Math.min(2 * wait_ms, 8000)) {
    const stop = new AbortController();
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    try {
      const response = await call("/live", { signal: stop.signal });
      if (!response.ok) throw new Error((await response.json()).error.message);
      const state = empty(); // every connection begins from nothing: so does a router that was restarted
      on.reset();
      alive();
      for await (const { event, data } of eventsOf(response)) {
        alive();
        wait_ms = 500;
        on.state("live");
        if (!data) continue;
        if (event === "about") on.about(JSON.parse(data));
        else {
          const change = JSON.parse(data);
          apply(state, change);
          on.change(state, change);
        }
      }
    } catch {
      // whatever it was: said below, and tried again
    } finally {
      clearTimeout(timer);
    }
    on.state("lost");
    await new Promise((resolve) => setTimeout(resolve, wait_ms));
  }
}
