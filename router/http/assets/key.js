// The API key, where the router asks for one: kept for this tab alone, sent as a header and nowhere else.

const dialog = document.getElementById("key");
const field = document.getElementById("key-text");
let waiting = null;

const kept = () => sessionStorage.getItem("kvrelay-key");

function askForKey() {
  if (waiting) return waiting;
  document.getElementById("key-wrong").textContent = kept() ? "The router does not know this key." : "";
  waiting = new Promise((resolve) => {
    const submit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("kvrelay-key", field.value);
      dialog.close();
    };
    dialog.querySelector("form").addEventListener("submit", submit);
    dialog.addEventListener("close", () => {
      dialog.querySelector("form").removeEventListener("submit", submit);
      field.value = "";
      waiting = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}

/** Like fetch, with the key; asks for one whenever the router refuses, until it does not. */
export async function call(path, options = {}) {
  for (;;) {
    const key = kept();
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await response.body?.cancel();
    if (key === kept()) await askForKey();
    if (options.signal?.aborted) throw new DOMException("stopped", "AbortError");
  }
}

/** The events of a response's stream, as they come: {event, data}; a comment is an event without data. */
export async function* eventsOf(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = { event: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("data: ")) event.data += line.slice(6);
          else if (line.startsWith("event: ")) event.event = line.slice(7);
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
