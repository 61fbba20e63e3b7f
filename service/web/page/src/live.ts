// The state of the service, as it tells it: cards, jobs, models, and whether it is there.

import { ConnectError } from "@connectrpc/connect";
import { computed, type Signal, signal } from "@preact/signals";
import { askForToken, isUnauthenticated, residency, server } from "./connection";
import type { AdapterInfo } from "./proto/moored/v1/model_pb";
import type { CardStatus, JobInfo, ModelInfo, Status } from "./proto/moored/v1/residency_pb";
import type { ServerInfo } from "./proto/moored/v1/server_pb";
import { isSame } from "./same";
import { interrupt, record } from "./timeline";

const INTERVAL_MS = 250;
const SHORTEST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;
/** A stream is silent while nothing changes; after so long the page asks whether the service is still there. */
const SILENCE_MS = 10000;
const ANSWER_MS = 5000;
const AGAIN_MS = 2000;

export const info = signal<ServerInfo | null>(null);
export const models = signal<ModelInfo[]>([]);
export const adapters = signal<AdapterInfo[]>([]);
export const cards: Signal<Signal<CardStatus>[]> = signal([]);
export const jobList: Signal<Signal<JobInfo>[]> = signal([]);
export const hostMemory = signal<Status["host"]>(undefined);

/** `asking` until the first status, `gone` between two attempts. */
export const connection = signal<"asking" | "there" | "gone" | "token">("asking");
/** When the next attempt is, as milliseconds of the clock. */
export const nextAttempt = signal(0);

type Role = "observe" | "generate" | "administer";

/** What the holder of the token may do. A service that says nothing of roles lets everybody do everything. */
export const role = computed<Role>(() => {
  const told = info.value?.role;
  return told === "observe" || told === "generate" ? told : "administer";
});
export const mayGenerate = computed(() => role.value !== "observe");
export const mayAdminister = computed(() => role.value === "administer");

/** The largest memory of a card, to which all are drawn in scale. */
export const largestCard = computed(() =>
  cards.value.reduce((most, card) => Math.max(most, Number(card.value.memory?.total ?? 0)), 1),
);

const STATES = ["running", "waiting", "queued"];

function byTurn(a: JobInfo, b: JobInfo): number {
  return (
    STATES.indexOf(a.state) - STATES.indexOf(b.state) || a.queuePosition - b.queuePosition || (a.id < b.id ? -1 : 1)
  );
}

/** Takes new values into the signals of a keyed list: those that stay keep their signal, and tell of changes alone. */
function update<T extends { id: string }>(list: Signal<Signal<T>[]>, found: T[]): void {
  const known = new Map(list.peek().map((each) => [each.peek().id, each]));
  const next = found.map((value) => {
    const old = known.get(value.id);
    if (!old) return signal(value);
    if (!isSame(old.peek(), value)) old.value = value;
    return old;
  });
  const before = list.peek();
  if (next.length !== before.length || next.some((each, index) => each !== before[index])) list.value = next;
}

function take(status: Status): void {
  update(cards, status.cards);
  update(jobList, status.jobs.toSorted(byTurn));
  if (!isSame(hostMemory.peek(), status.host)) hostMemory.value = status.host;
  record(status);
  if (connection.peek() !== "there") connection.value = "there";
}

let attempt: AbortController | null = null;
let wake: (() => void) | null = null;

/** Follows the service for as long as the page is open. */
export async function follow(): Promise<void> {
  let pause = SHORTEST_PAUSE_MS;
  for (;;) {
    if (document.hidden) await shown();
    attempt = new AbortController();
    const { signal: ended } = attempt;
    let silence = setTimeout(() => attempt?.abort(), SILENCE_MS);
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => void ask(ended).then(listen, () => attempt?.abort()), SILENCE_MS);
    };
    try {
      info.value = await server.getServerInfo({}, { signal: attempt.signal });
      void listModels();
      for await (const status of residency.watchStatus({ intervalMs: INTERVAL_MS }, { signal: attempt.signal })) {
        listen();
        take(status);
        pause = SHORTEST_PAUSE_MS;
      }
    } catch (error) {
      if (document.hidden) continue;
      if (isUnauthenticated(error)) {
        connection.value = "token";
        askForToken();
        await woken(Infinity);
        continue;
      }
      console.info(ConnectError.from(error).message);
    } finally {
      clearTimeout(silence);
      interrupt();
    }
    if (document.hidden) continue;
    connection.value = "gone";
    nextAttempt.value = Date.now() + pause;
    await woken(pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

/** Asks for the status once: a service that is there answers soon. */
async function ask(ended: AbortSignal): Promise<void> {
  take(await residency.getStatus({}, { timeoutMs: ANSWER_MS, signal: ended }));
}

function woken(pause: number): Promise<void> {
  return new Promise((done) => {
    const timer = pause === Infinity ? 0 : setTimeout(done, pause);
    wake = () => {
      clearTimeout(timer);
      done();
    };
  });
}

/** Tries again now: the user asked, or there is a new token. */
export function tryNow(): void {
  connection.value = "asking";
  attempt?.abort();
  wake?.();
}

// A browser has six connections to a service without TLS, for all pages together: a page that nobody sees leaves its own.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) attempt?.abort();
  else wake?.();
});

function shown(): Promise<void> {
  return new Promise((done) => {
    document.addEventListener("visibilitychange", () => done(), { once: true });
  });
}

/** Lists the models; a rescan that fails is the caller's, and what else fails is tried again. */
export async function listModels(rescan = false): Promise<void> {
  try {
    const listed = await residency.listModels({ rescan });
    models.value = listed.models;
    adapters.value = listed.adapters;
  } catch (error) {
    if (rescan) throw error;
    if (isUnauthenticated(error)) askForToken();
    else if (connection.peek() !== "gone") setTimeout(listModels, AGAIN_MS);
  }
}

/** As one text: it tells of changes alone, where a list would be a new one each time. */
const residentText = computed(() => {
  const keys = new Set(cards.value.flatMap((card) => card.value.residents.flatMap((each) => each.entries)));
  return [...keys].sort().join("\0");
});

/** Keys of the entries that are in the memory of any card. */
export const residentKeys = computed(() => residentText.value.split("\0").filter(Boolean));
