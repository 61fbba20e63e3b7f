// The memory of each card for as long as the page is open, by component and account, and who waited for whom.

import { signal } from "@preact/signals";
import { foreignHolders } from "./holders";
import type { CardStatus, JobInfo, Status } from "./proto/moored/v1/residency_pb";

/** Samples of a card. Once there are so many, every second of them goes: the time that is shown stays whole. */
const MOST_SAMPLES = 960;
const MOST_WAITS = 200;

/** What a part of a stack is of. */
export interface Series {
  key: string;
  /** `model` with its number, or an account. */
  kind: "foreign" | "driver" | "model" | "scratch";
  model: number;
  label: string;
}

export interface Sample {
  time: number;
  bytes: Map<string, number>;
  /** From here on nothing is known, until the next sample. */
  isGap?: boolean;
}

/** A job that waited for memory. */
export interface Wait {
  job: string;
  model: string;
  card: string;
  from: number;
  until: number;
  isOver: boolean;
  whom: string;
}

export class CardHistory {
  readonly samples: Sample[] = [];
  /** In the order in which they are stacked. */
  readonly series: Series[] = [];
  total = 0;
  constructor(readonly card: string) {}

  add(time: number, status: CardStatus): void {
    const memory = status.memory;
    if (!memory) return;
    this.total = Number(memory.total);
    const bytes = new Map<string, number>();
    const put = (series: Series, value: number) => {
      if (value <= 0) return;
      this.know(series);
      bytes.set(series.key, (bytes.get(series.key) ?? 0) + value);
    };
    put({ key: "foreign", kind: "foreign", model: 0, label: "Other programs" }, Number(memory.foreign));
    put({ key: "driver", kind: "driver", model: 0, label: "Driver" }, driverBytes(status));
    let left = Number(memory.components);
    for (const resident of status.residents) {
      const name = resident.component?.name ?? "";
      const entry = resident.entries[0] ?? "";
      const value = Math.min(left, Number(resident.streamed?.residentBytes ?? resident.component?.bytes ?? 0));
      left -= value;
      put({ key: `${entry}\n${name}`, kind: "model", model: modelNumber(entry), label: `${name} of ${entry}` }, value);
    }
    put({ key: "rest", kind: "model", model: 0, label: "Other components" }, left);
    put({ key: "scratch", kind: "scratch", model: 0, label: "Working memory" }, Number(memory.scratch));
    this.push({ time, bytes });
  }

  private know(series: Series): void {
    if (this.series.some((each) => each.key === series.key)) return;
    this.series.push(series);
    const order = ["foreign", "driver", "model", "scratch"];
    this.series.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind) || a.model - b.model);
  }

  /** Nothing is known after the last status. */
  interrupt(time: number): void {
    if (this.samples.length && !this.samples.at(-1)!.isGap) this.push({ time, bytes: new Map(), isGap: true });
  }

  private push(sample: Sample): void {
    const last = this.samples.at(-1);
    // A value holds until the next sample.
    if (last && last.isGap === sample.isGap && isEqual(last.bytes, sample.bytes)) return;
    this.samples.push(sample);
    if (this.samples.length < MOST_SAMPLES) return;
    const thinner = this.samples.filter((_, index) => index % 2 === 0 || index === this.samples.length - 1);
    this.samples.splice(0, this.samples.length, ...thinner);
  }
}

function isEqual(a: Map<string, number>, b: Map<string, number>): boolean {
  if (a.size !== b.size) return false;
  for (const [key, value] of a) if (b.get(key) !== value) return false;
  return true;
}

/** Bytes that are neither a model's, nor a stage's, nor another program's, nor free. */
export function driverBytes(card: CardStatus): number {
  const memory = card.memory;
  if (!memory) return 0;
  return Number(memory.context + memory.workspaces + memory.slack + memory.unexplained);
}

const numbers = new Map<string, number>();

/** The number of a model's colour: entries have them in the order in which they are seen. */
export function modelNumber(entry: string): number {
  let number = numbers.get(entry);
  if (number === undefined) {
    number = numbers.size;
    numbers.set(entry, number);
  }
  return number;
}

export const histories = new Map<string, CardHistory>();
export const waits: Wait[] = [];
/** Counts the statuses: who draws the timeline follows it. */
export const ticks = signal(0);

/** When the last status came. */
export const lastStatus = { at: 0 };

/** Adds what a status says. */
export function record(status: Status): void {
  const now = Date.now();
  lastStatus.at = now;
  for (const card of status.cards) {
    let history = histories.get(card.id);
    if (!history) histories.set(card.id, (history = new CardHistory(card.id)));
    history.add(now, card);
  }
  recordWaits(now, status);
  ticks.value++;
}

/** The service is not followed from the last status on, until the next one. */
export function interrupt(): void {
  for (const history of histories.values()) history.interrupt(lastStatus.at);
  for (const wait of waits) wait.isOver = true;
}

function recordWaits(now: number, status: Status): void {
  const waiting = new Map(status.jobs.filter((job) => job.state === "waiting").map((job) => [job.id, job]));
  for (const wait of waits) {
    if (wait.isOver) continue;
    wait.until = now;
    wait.isOver = !waiting.delete(wait.job);
  }
  for (const job of waiting.values()) {
    const card = status.cards.find((each) => each.id === job.card) ?? status.cards[0];
    waits.push({
      job: job.id,
      model: job.modelKey,
      card: card?.id ?? "",
      from: now,
      until: now,
      isOver: false,
      whom: card ? whomFor(card, job) : "memory",
    });
  }
  if (waits.length > MOST_WAITS) waits.splice(0, waits.length - MOST_WAITS);
}

/** Who holds memory that a job on this card could wait for. */
function whomFor(card: CardStatus, job: JobInfo): string {
  const names = [
    ...foreignHolders(card).map((holder) => holder.name),
    ...card.reservations.map((reservation) => `reservation for ${reservation.label || "another program"}`),
    ...(card.jobId && card.jobId !== job.id ? [`job ${card.jobId}`] : []),
  ];
  return names.length ? names.join(", ") : "memory that is being freed";
}

/** Says whom a job waits for, as its own stream told it. */
export function tellWait(job: string, whom: string): void {
  const wait = waits.findLast((each) => each.job === job && !each.isOver);
  if (wait && whom) wait.whom = whom;
}
