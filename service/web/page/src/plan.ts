// What the service would do with the request of the form: asked for a moment after the form or the cards change.

import { effect, signal } from "@preact/signals";
import { type Problem, problemOf, residency } from "./connection";
import { fields, order, startPicture } from "./form";
import { connection, mayGenerate, residentKeys } from "./live";
import type { PlanResponse } from "./proto/moored/v1/residency_pb";
import { size } from "./words";

const PAUSE_MS = 400;
/** What cannot run now is asked for again, for as long as the form is seen. */
const AGAIN_MS = 3000;
/** A larger picture to start from is left out of the plan: it would be sent at each change. */
const MOST_BYTES = 1 << 20;

export const plan = signal<PlanResponse | null>(null);
export const planProblem = signal<Problem | null>(null);
/** Whether the form is seen. */
export const isPlanning = signal(false);

let asked = 0;
let again: ReturnType<typeof setTimeout> | undefined;

effect(() => {
  for (const [name, field] of Object.entries(fields)) if (name !== "prompt") void field.value;
  void residentKeys.value;
  void startPicture.value;
  if (!isPlanning.value || !mayGenerate.value || connection.value !== "there") return;
  const timer = setTimeout(ask, PAUSE_MS);
  return () => clearTimeout(timer);
});

async function ask(): Promise<void> {
  clearTimeout(again);
  const wanted = order();
  if (!wanted || !isPlanning.peek() || connection.peek() !== "there") return;
  const mine = ++asked;
  if (wanted.medium !== "audio" && (wanted.request.initImage?.length ?? 0) > MOST_BYTES)
    wanted.request.initImage = undefined;
  const kind = { image: "generate", video: "video", audio: "audio" } as const;
  try {
    const told = await residency.plan({ request: { case: kind[wanted.medium], value: wanted.request } as never });
    if (mine !== asked) return;
    plan.value = told;
    planProblem.value = null;
    if (!told.runsNow) again = setTimeout(ask, AGAIN_MS);
  } catch (error) {
    if (mine !== asked) return;
    plan.value = null;
    planProblem.value = problemOf(error);
  }
}

/** A plan in a sentence. */
export function planWords(told: PlanResponse): string {
  const short = told.stages.find((stage) => stage.verdict !== "run");
  const moves = told.stages.flatMap((stage) => stage.moves);
  const moved = (kind: string) =>
    [...new Set(moves.filter((move) => move.startsWith(`${kind} `)).map(componentOf))].join(", ");
  const bytes = told.stages.reduce(
    (most, stage) => Math.max(most, Number(stage.componentBytes + stage.scratchBytes)),
    0,
  );
  const peak = `Needs ${size(bytes)} at its peak on ${told.card}.`;
  if (short?.verdict === "never") {
    const capacity = short.shortfall?.capacityBytes;
    return `Does not fit: ${short.name} needs ${size(short.shortfall?.neededBytes ?? 0n)}${capacity ? `, and the card can give ${size(capacity)}` : ""}.`;
  }
  if (short) {
    const holders = short.shortfall?.holders.map((holder) => holder.name) ?? [];
    return `Would wait for memory${holders.length ? `, which ${holders.join(", ")} holds` : ""}. ${peak}`;
  }
  if (!moves.length) return `Can run now. ${peak}`;
  const seconds = told.predictedMoveSeconds;
  const time = seconds >= 0.05 ? `, about ${seconds.toFixed(1)} s` : "";
  const first = [moved("evict") && `evicts ${moved("evict")}`, moved("load") && `loads ${moved("load")}`].filter(
    Boolean,
  );
  return `Can run now.${first.length ? ` First it ${first.join(" and ")}${time}.` : ""} ${peak}`;
}

/** `transformer`, of `load transformer (20.0 MiB)` or of `load 3 GiB of transformer (20.0 GiB), and stream the rest`. */
function componentOf(move: string): string {
  return /^\w+ (?:.+ of )?(.+) \(/.exec(move)?.[1] ?? move;
}
