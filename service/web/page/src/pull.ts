// A download from the hub, which the service does: one at a time from this page.

import { signal } from "@preact/signals";
import { announce } from "./announcements";
import { hub, problemOf } from "./connection";
import { listModels } from "./live";
import { size } from "./words";

export interface Pulling {
  name: string;
  words: string;
  /** From 0 to 1; below 0 where nobody knows. */
  share: number;
}

export const pulling = signal<Pulling | null>(null);

let abort = new AbortController();

export async function pull(name: string): Promise<void> {
  if (pulling.value || !name) return;
  abort = new AbortController();
  pulling.value = { name, words: "asking the hub", share: -1 };
  try {
    for await (const { event } of hub.pullModel({ id: name }, { signal: abort.signal })) {
      if (event.case === "progress") {
        const { bytesDone, bytesTotal, filesDone, filesTotal } = event.value;
        pulling.value = {
          name,
          words: `${size(bytesDone)} of ${size(bytesTotal)}, ${filesDone} of ${filesTotal} files`,
          share: bytesTotal ? Number(bytesDone) / Number(bytesTotal) : -1,
        };
      }
      if (event.case === "pulled")
        announce(`Pulled ${event.value.id}: ${size(event.value.bytesFetched)} were fetched.`);
    }
    void listModels();
  } catch (error) {
    if (abort.signal.aborted) announce(`The pull of ${name} was stopped. What was fetched stays for the next.`);
    else announce(problemOf(error).message, true);
  } finally {
    pulling.value = null;
  }
}

/** Stops listening; the service stops with its last listener. */
export function stopPull(): void {
  abort.abort();
}
