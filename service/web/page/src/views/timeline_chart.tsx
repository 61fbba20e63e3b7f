import { useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { connection } from "../live";
import { colours } from "../theme";
import {
  type CardHistory,
  histories,
  lastStatus,
  type Sample,
  type Series,
  ticks,
  type Wait,
  waits,
} from "../timeline";
import { clock, duration, size } from "../words";

const MODEL_COLOURS = 6;
const HEIGHT = 96;
const MOVE_MS = 1000;
const WAITS_HEIGHT = 14;
/** The shortest time that the axis shows: a page that was just opened has little to show. */
const SHORTEST_MS = 30000;
const ROWS = 12;

export function Timeline({ card }: { card: string }) {
  const isTable = useSignal(false);
  const figure = useRef<HTMLElement>(null);
  return (
    <figure class="timeline" ref={figure}>
      <figcaption>Memory since this page is open; the height is {size(histories.get(card)?.total ?? 0)}</figcaption>
      <Chart card={card} />
      <WaitList card={card} />
      <details onToggle={(event) => (isTable.value = event.currentTarget.open)}>
        <summary>The timeline as a table</summary>
        {isTable.value && <Table card={card} />}
      </details>
    </figure>
  );
}

function Chart({ card }: { card: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const told = useSignal("");
  const from = useSignal("");
  useEffect(() => {
    // The axis moves while nothing changes.
    const timer = setInterval(() => {
      from.value = clock(beginOf(card));
      schedule(card, () => drawCard(canvas.current, card));
    }, MOVE_MS);
    from.value = clock(beginOf(card));
    return () => clearInterval(timer);
  }, [card]);
  useSignalEffect(() => {
    void ticks.value;
    void colours.value;
    schedule(card, () => drawCard(canvas.current, card));
    const minute = Math.floor(Date.now() / 10000);
    if (!told.peek().endsWith(` ${minute}`)) told.value = `${summary(card)} ${minute}`;
  });
  const words = told.value.replace(/ \d+$/, "");
  return (
    <>
      <canvas ref={canvas} role="img" aria-label={words} height={HEIGHT} />
      <div class="axis" aria-hidden="true">
        <span>{from}</span>
        <span>now</span>
      </div>
    </>
  );
}

function drawCard(canvas: HTMLCanvasElement | null, card: string): void {
  const history = histories.get(card);
  if (!canvas || !history) return;
  draw(
    canvas,
    history,
    waits.filter((wait) => wait.card === card),
  );
}

function summary(card: string): string {
  const last = histories.get(card)?.samples.findLast((sample) => !sample.isGap);
  if (!last) return `Timeline of ${card}: nothing is known yet.`;
  const parts = histories.get(card)!.series.map((series) => [series.label, last.bytes.get(series.key) ?? 0] as const);
  const now = parts.filter(([, bytes]) => bytes > 0).map(([label, bytes]) => `${label} ${size(bytes)}`);
  return `Timeline of ${card}. Last: ${now.join(", ") || "all is free"}. The table below has the course.`;
}

// One card a frame: four at once would take longer than a frame has.
const drawings = new Map<string, () => void>();
let isScheduled = false;

function schedule(card: string, drawing: () => void): void {
  drawings.set(card, drawing);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(drawNext);
}

function drawNext(): void {
  const first = drawings.entries().next();
  isScheduled = false;
  if (first.done) return;
  const [card, drawing] = first.value;
  drawings.delete(card);
  drawing();
  if (!drawings.size) return;
  isScheduled = true;
  requestAnimationFrame(drawNext);
}

interface Palette {
  models: string[];
  foreign: string;
  driver: string;
  scratch: string;
  line: string;
  wait: string;
}

let palette: Palette | null = null;
let paletteOf = -1;

/** The colours of the page, as the browser has resolved them for this element. */
function paletteFor(canvas: HTMLCanvasElement): Palette {
  if (palette && paletteOf === colours.peek()) return palette;
  const value = (name: string) => {
    canvas.style.color = `var(--${name})`;
    return getComputedStyle(canvas).color;
  };
  paletteOf = colours.peek();
  palette = {
    models: Array.from({ length: MODEL_COLOURS }, (_, index) => value(`model-${index}`)),
    foreign: value("foreign"),
    driver: value("driver"),
    scratch: value("scratch"),
    line: value("line"),
    wait: value("bad"),
  };
  return palette;
}

function colourOf(series: Series, colour: Palette): string {
  return series.kind === "model" ? colour.models[series.model % MODEL_COLOURS]! : colour[series.kind];
}

/** Where the time axis ends: now, or where a service that is gone said its last. */
const now = (): number => (connection.peek() === "there" ? Date.now() : lastStatus.at);

/** Where the time axis begins. */
const beginOf = (card: string): number =>
  Math.min(histories.get(card)?.samples[0]?.time ?? Infinity, now() - SHORTEST_MS);

function draw(canvas: HTMLCanvasElement, history: CardHistory, ofCard: Wait[]): void {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const width = canvas.clientWidth;
  if (!width || !history.samples.length) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== HEIGHT * ratio) {
    canvas.width = Math.round(width * ratio);
    canvas.height = HEIGHT * ratio;
  }
  const context = canvas.getContext("2d");
  if (!context) return;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, HEIGHT);
  const colour = paletteFor(canvas);
  const end = now();
  const begin = beginOf(history.card);
  const x = (time: number) => ((time - begin) / (end - begin)) * width;
  const bottom = HEIGHT - WAITS_HEIGHT;
  const scale = bottom / (history.total || 1);
  const samples = thinned(history.samples, x);
  const base = new Float64Array(samples.length);
  const components = new Map<number, number>();
  for (const series of history.series) {
    // Components of one model differ a little.
    const before = series.kind === "model" ? (components.get(series.model) ?? 0) : 0;
    components.set(series.model, before + 1);
    context.globalAlpha = 1 - 0.13 * (before % 4);
    stack(context, series, samples, base, { x, bottom, scale, width, fill: colourOf(series, colour) });
  }
  context.globalAlpha = 1;
  context.fillStyle = colour.line;
  context.fillRect(0, 0, width, 1);
  context.fillRect(0, bottom, width, 1);
  context.fillStyle = colour.wait;
  for (const wait of ofCard) {
    if (wait.until < begin) continue;
    const from = Math.max(0, x(wait.from));
    context.fillRect(from, bottom + 4, Math.max(3, x(wait.until) - from), 6);
  }
}

/** At most one sample for each pixel across. */
function thinned(samples: Sample[], x: (time: number) => number): Sample[] {
  const found: Sample[] = [];
  let column = -1;
  for (const sample of samples) {
    const at = Math.floor(x(sample.time));
    if (at === column) found[found.length - 1] = sample;
    else found.push(sample);
    column = at;
  }
  return found;
}

interface Frame {
  x: (time: number) => number;
  bottom: number;
  scale: number;
  width: number;
  fill: string;
}

/** Draws one band of the stack in steps: a value holds until the next sample. */
function stack(
  context: CanvasRenderingContext2D,
  series: Series,
  samples: Sample[],
  base: Float64Array,
  frame: Frame,
): void {
  const { x, bottom, scale, width } = frame;
  context.fillStyle = frame.fill;
  context.beginPath();
  for (let index = 0; index < samples.length; index++) {
    const value = samples[index]!.bytes.get(series.key);
    if (!value) continue;
    const left = x(samples[index]!.time);
    const right = index + 1 < samples.length ? x(samples[index + 1]!.time) : width;
    const low = base[index]!;
    const top = low + value;
    base[index] = top;
    context.rect(left, bottom - top * scale, Math.max(right - left, 1) + 0.3, value * scale);
  }
  context.fill();
}

/** The last waits, with whom they waited for. */
function WaitList({ card }: { card: string }) {
  void ticks.value;
  const last = waits.filter((wait) => wait.card === card).slice(-3);
  if (!last.length) return null;
  return (
    <ul class="waits">
      {last.map((wait) => (
        <li key={`${wait.job} ${wait.from}`}>
          <span class="swatch wait" aria-hidden="true" />
          {clock(wait.from)}: {wait.job} {wait.isOver ? "waited" : "waits"} {duration(wait.until - wait.from)} for{" "}
          {wait.whom}
        </li>
      ))}
    </ul>
  );
}

function Table({ card }: { card: string }) {
  void ticks.value;
  const history = histories.get(card);
  if (!history) return null;
  const { samples, series } = history;
  const known = samples.filter((sample) => !sample.isGap);
  const step = Math.max(1, Math.ceil(known.length / ROWS));
  const rows = known.filter((_, index) => (known.length - 1 - index) % step === 0).reverse();
  return (
    // Wide tables scroll, and what scrolls must take the keyboard.
    <div class="scroll" tabIndex={0} role="region" aria-label={`Table of the memory of ${card}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">Time</th>
            {series.map((each) => (
              <th key={each.key} scope="col">
                {each.label}
              </th>
            ))}
            <th scope="col">Free</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((sample) => (
            <tr key={sample.time}>
              <th scope="row">{clock(sample.time)}</th>
              {series.map((each) => (
                <td key={each.key}>{size(sample.bytes.get(each.key) ?? 0)}</td>
              ))}
              <td>{size(history.total - [...sample.bytes.values()].reduce((sum, each) => sum + each, 0))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
