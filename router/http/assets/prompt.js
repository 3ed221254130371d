// The prompt box: asks the router as any client does, and shows the answer as it comes.

import { call, eventsOf } from "./key.js";

const byId = (id) => document.getElementById(id);
let stop = null;

export function setUpPrompt(about) {
  byId("prompt").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!stop) ask(about());
  });
  byId("stop").addEventListener("click", () => stop?.abort());
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) byId("prompt").requestSubmit();
  });
}

async function ask({ model, chat }) {
  const text = byId("text").value;
  const prompt = chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const body = { model, ...prompt, max_tokens: Number(byId("max-tokens").value), stream: true, stream_options: { include_usage: true } };
  const answer = byId("answer");
  const asked_at = performance.now();
  let first_at = null, last_at = null, num_tokens = 0, how = "";
  answer.textContent = "";
  say("waiting for the first token");
  show(true);
  stop = new AbortController();
  try {
    const response = await call(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: stop.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const { data } of eventsOf(response)) {
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      const piece = choice && (chat ? choice.delta?.content : choice.text);
      if (piece) {
        first_at ??= performance.now();
        last_at = performance.now();
        num_tokens += 1;
        answer.append(piece);
        answer.scrollTop = answer.scrollHeight;
      }
      if (chunk.usage) num_tokens = chunk.usage.completion_tokens;
    }
  } catch (error) {
    how = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    stop = null;
    show(false);
  }
  const parts = first_at === null ? [] : [`TTFT ${(first_at - asked_at).toFixed(0)} ms`, `${num_tokens} tokens`];
  if (num_tokens > 1 && last_at > first_at) parts.push(`${((num_tokens - 1) / (last_at - first_at) * 1e3).toFixed(1)} tokens/s`);
  say([...parts, how].filter(Boolean).join(" · "));
}

function show(isRunning) {
  const had = document.activeElement;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  if (had === byId("send") || had === byId("stop")) byId(isRunning ? "stop" : "send").focus();
}

const say = (text) => { byId("answer-figures").textContent = text; };
