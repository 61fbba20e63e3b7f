// What this page generates: each run is a request, its progress, and its results. They are in memory, for as long as the page is open.

import type { MessageInitShape } from "@bufbuild/protobuf";
import { batch, type Signal, signal } from "@preact/signals";
import { announce } from "./announcements";
import { CLIENT_ID, generation, isGone, type Problem, problemOf, jobs } from "./connection";
import type { Artifact, Event, Waiting } from "./proto/moored/v1/events_pb";
import {
  FilmFormat,
  type GenerateAudioRequestSchema,
  type GenerateImageRequestSchema,
  type GenerateVideoRequestSchema,
} from "./proto/moored/v1/generation_pb";
import { tellWait } from "./timeline";
import { causeName, duration, sentence, size, slug, stageName } from "./words";

/**
 * Streams at a time. A browser has six connections to a service without TLS, and the status, a second page, and calls such as
 * Cancel need some. What is more waits here, in the order in which it came. In HTTP/2 all share one connection.
 */
const MOST_STREAMS = protocol() === "h2" ? 16 : 2;

function protocol(): string {
  const [navigation] = performance.getEntriesByType("navigation") as PerformanceNavigationTiming[];
  return navigation?.nextHopProtocol ?? "";
}

const PREVIEW_MS = 250;

export type Medium = "image" | "video" | "audio";

/** A request, as the form made it. */
export type Order =
  | { medium: "image"; request: MessageInitShape<typeof GenerateImageRequestSchema> }
  | { medium: "video"; request: MessageInitShape<typeof GenerateVideoRequestSchema> }
  | { medium: "audio"; request: MessageInitShape<typeof GenerateAudioRequestSchema> };

export interface Result {
  url: string;
  mediaType: string;
  fileName: string;
  width: number;
  height: number;
  seed: string;
  /** `vocals`, of one of several tracks; else empty. */
  track: string;
  blob: Blob;
}

export type RunState = "here" | "sent" | "queued" | "waiting" | "running" | "done" | "failed" | "cancelled";

const ENDED: RunState[] = ["done", "failed", "cancelled"];

export class Run {
  readonly id = ++lastRun;
  readonly state: Signal<RunState> = signal("here");
  readonly jobId = signal("");
  /** The model as it was resolved. */
  readonly modelKey = signal("");
  /** What happens now. */
  readonly words = signal("Waits in this page");
  /** From 0 to 1; below 0 where nobody knows. */
  readonly progress = signal(-1);
  readonly waiting: Signal<Waiting | null> = signal(null);
  readonly preview = signal("");
  readonly results: Signal<Result[]> = signal([]);
  readonly notes: Signal<string[]> = signal([]);
  readonly problem: Signal<Problem | null> = signal(null);
  readonly tookMs = signal(0);
  readonly abort = new AbortController();
  private readonly parts = new Map<string, Parts>();

  constructor(
    readonly order: Order,
    readonly modelId: string,
  ) {}

  get prompt(): string {
    return this.order.request.prompt ?? "";
  }

  get isOver(): boolean {
    return ENDED.includes(this.state.value);
  }

  private stream(): AsyncIterable<Event> {
    const options = { signal: this.abort.signal };
    switch (this.order.medium) {
      case "image":
        return generation.generateImage(this.order.request, options);
      case "video":
        return generation.generateVideo({ ...this.order.request, output: FilmFormat.MP4 }, options);
      case "audio":
        return generation.generateAudio(this.order.request, options);
    }
  }

  async follow(): Promise<void> {
    this.state.value = "sent";
    this.words.value = "Sent";
    try {
      for await (const event of this.stream()) batch(() => this.take(event));
      if (!this.isOver)
        this.end("failed", { message: "The stream ended early.", reason: "", fields: [], fallbacks: [] });
    } catch (error) {
      const problem = problemOf(error);
      if (this.abort.signal.aborted || problem.reason === "CANCELLED")
        this.end("cancelled", null, problem.reason ? problem.message : "");
      else if (isGone(error))
        this.end("failed", { ...problem, message: `${problem.message} The job has ended with it.` });
      else this.end("failed", problem);
    }
  }

  private take(event: Event): void {
    this.jobId.value = event.jobId;
    const { case: kind, value } = event.event;
    if (kind !== "waiting" && kind !== "preview") this.waiting.value = null;
    switch (kind) {
      case "accepted":
        this.modelKey.value = value.model?.key ?? "";
        this.notes.value = [
          ...(value.model?.choice ? [value.model.choice] : []),
          ...value.leftOut.map((each) => each.message),
        ];
        break;
      case "queued": {
        this.state.value = "queued";
        const when = value.estimateMs === undefined ? "" : `, about ${duration(value.estimateMs)}`;
        this.words.value = value.position ? `Queued, ${value.position} ahead${when}` : `Queued, next${when}`;
        break;
      }
      case "waiting":
        this.state.value = "waiting";
        this.waiting.value = value;
        this.words.value = `Waits for memory, ${duration(value.patienceLeftMs)} of patience left`;
        tellWait(event.jobId, whomOf(value));
        break;
      case "evicting":
        this.state.value = "running";
        this.words.value = `Makes room: ${value.component?.name ?? ""} leaves ${value.card}`;
        break;
      case "loading":
        this.state.value = "running";
        this.progress.value = value.bytesTotal ? Number(value.bytesDone) / Number(value.bytesTotal) : -1;
        this.words.value = `Loading ${value.component?.name ?? ""}, ${size(value.bytesDone)} of ${size(value.bytesTotal)}`;
        break;
      case "retrying":
        this.words.value = value.message;
        break;
      case "stage":
        this.state.value = "running";
        this.progress.value = -1;
        this.words.value = sentence(`${stageName(value.name)}, stage ${value.index} of ${value.of}`);
        break;
      case "step": {
        this.progress.value = value.n / value.of;
        const part = value.parts ? `, section ${value.part} of ${value.parts}` : "";
        const item = (this.order.request.count ?? 1) > 1 ? `, result ${value.item + 1}` : "";
        this.words.value = `Step ${value.n} of ${value.of}${part}${item}`;
        break;
      }
      case "preview":
        this.show(new Blob([value.jpeg as Uint8Array<ArrayBuffer>], { type: "image/jpeg" }));
        break;
      case "artifact":
        this.collect(value);
        break;
      case "done":
        this.tookMs.value = Number(value.totalMs);
        this.notes.value = [...this.notes.value, ...value.approximations];
        this.end("done", null);
        break;
    }
  }

  private show(blob: Blob | null): void {
    const old = this.preview.value;
    this.preview.value = blob ? URL.createObjectURL(blob) : "";
    // The picture that is shown keeps its bytes until it is replaced.
    if (old) setTimeout(() => URL.revokeObjectURL(old), 1000);
  }

  private collect(piece: Artifact): void {
    const key = `${piece.index} ${piece.mediaType} ${piece.track}`;
    let parts = this.parts.get(key);
    if (!parts) this.parts.set(key, (parts = new Parts(piece)));
    parts.add(piece);
    if (!piece.last) return;
    this.parts.delete(key);
    this.results.value = [...this.results.value, this.resultOf(parts, piece)];
  }

  private resultOf(parts: Parts, piece: Artifact): Result {
    const first = parts.first;
    const format = first.format;
    const seed = first.metadata.seed ?? "";
    const ending = first.mediaType.split("/")[1] ?? "bin";
    const name = [slug(this.prompt) || slug(this.modelId) || "moored", seed || String(first.index), piece.track];
    const blob = new Blob([parts.bytes], { type: first.mediaType });
    return {
      url: URL.createObjectURL(blob),
      mediaType: first.mediaType,
      fileName: `${name.filter(Boolean).join("-")}.${ending}`,
      width: format.case === "audio" || !format.value ? 0 : format.value.width,
      height: format.case === "audio" || !format.value ? 0 : format.value.height,
      seed,
      track: first.track,
      blob,
    };
  }

  end(state: RunState, problem: Problem | null, why = ""): void {
    if (this.isOver) return;
    batch(() => {
      this.state.value = state;
      this.problem.value = problem;
      this.waiting.value = null;
      this.progress.value = -1;
      this.words.value =
        state === "done"
          ? `Done in ${duration(this.tookMs.value)}`
          : state === "cancelled"
            ? why || "Cancelled"
            : "Failed";
      this.parts.clear();
      this.show(null);
    });
    const what = NAMES[this.order.medium];
    if (state === "done") announce(`${what} ready: ${this.prompt || this.modelId}`);
    else if (state === "failed") announce(`${what} failed: ${problem?.message ?? ""}`, true);
  }

  /** Ends it, whatever it does now. */
  async cancel(): Promise<void> {
    if (this.isOver) return;
    if (this.state.value === "here" || !this.jobId.value) {
      this.abort.abort();
      this.end("cancelled", null);
      return;
    }
    this.words.value = "Cancelling";
    try {
      await jobs.cancel({ jobId: this.jobId.value, clientId: CLIENT_ID });
    } catch (error) {
      // Leaving the stream cancels the job too.
      this.abort.abort();
      announce(problemOf(error).message, true);
    }
  }

  /** Gives the memory of its results back. */
  release(): void {
    for (const result of this.results.value) URL.revokeObjectURL(result.url);
    this.show(null);
  }
}

const NAMES: Record<Medium, string> = { image: "Picture", video: "Film", audio: "Track" };

/** The bytes of an artifact, as they come. */
class Parts {
  bytes: Uint8Array<ArrayBuffer>;
  private end = 0;

  constructor(readonly first: Artifact) {
    this.bytes = new Uint8Array(Number(first.totalBytes));
  }

  add(piece: Artifact): void {
    const at = piece.offset === undefined ? this.end : Number(piece.offset);
    this.end = at + piece.chunk.length;
    if (this.end > this.bytes.length) {
      const longer = new Uint8Array(this.end);
      longer.set(this.bytes);
      this.bytes = longer;
    }
    this.bytes.set(piece.chunk, at);
  }
}

/** Whom a job waits for. */
export function whomOf(waiting: Waiting): string {
  const holders = waiting.holders.map(
    (holder) => `${holder.name}${holder.pid ? ` (process ${holder.pid})` : ""}: ${size(holder.bytes)}`,
  );
  return holders.length ? holders.join(", ") : causeName(waiting.cause);
}

let lastRun = 0;
let streams = 0;

/** The newest first. */
export const runs: Signal<Run[]> = signal([]);

/** The run of a job, where it is one of this page. */
export function runOf(jobId: string): Run | undefined {
  return runs.value.find((run) => run.jobId.value === jobId);
}

export function start(order: Order, modelId: string): Run {
  const request = order.request;
  request.options = { ...request.options, clientId: CLIENT_ID } as typeof request.options;
  if (order.medium !== "audio") order.request.previewIntervalMs = PREVIEW_MS;
  const run = new Run(order, modelId);
  runs.value = [run, ...runs.value];
  next();
  return run;
}

function next(): void {
  while (streams < MOST_STREAMS) {
    const run = runs.value.findLast((each) => each.state.value === "here");
    if (!run) return;
    streams++;
    void run.follow().finally(() => {
      streams--;
      next();
    });
  }
}

export function remove(run: Run): void {
  run.release();
  runs.value = runs.value.filter((each) => each !== run);
}

/** Whether leaving the page would end jobs. */
export const hasWork = (): boolean => runs.value.some((run) => !run.isOver);
