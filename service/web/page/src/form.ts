// What the form of the view Generate holds, and the request that it makes.

import type { MessageInitShape } from "@bufbuild/protobuf";
import { computed, signal } from "@preact/signals";
import { models } from "./live";
import type { QuantizationSchema } from "./proto/moored/v1/model_pb";
import type { ModelInfo } from "./proto/moored/v1/residency_pb";
import type { Medium, Order, Result, Run } from "./runs";

export const MODULO = 16;

/** Text of fields; empty: the model's default. */
export const fields = {
  prompt: signal(""),
  /** `id@revision`. */
  model: signal(""),
  /** A preset, or formats of components: `transformer=fp8,vae=full`. */
  precision: signal(""),
  shape: signal<Shape>("default"),
  width: signal(""),
  height: signal(""),
  frames: signal(""),
  rate: signal(""),
  cards: signal(""),
  seconds: signal(""),
  lyrics: signal(""),
  steps: signal(""),
  seed: signal(""),
  count: signal("1"),
  guidance: signal(""),
  negative: signal(""),
  trueGuidance: signal(""),
  strength: signal(""),
  adapter: signal(""),
  adapterStrength: signal(""),
};

export interface StartPicture {
  name: string;
  bytes: Uint8Array<ArrayBuffer>;
  url: string;
}

export const startPicture = signal<StartPicture | null>(null);

export type Shape = "default" | "square" | "landscape" | "portrait" | "wide" | "tall" | "custom";

const RATIOS: Record<Exclude<Shape, "default" | "custom">, [string, number]> = {
  square: ["Square", 1],
  landscape: ["Landscape 3:2", 3 / 2],
  portrait: ["Portrait 2:3", 2 / 3],
  wide: ["Wide 16:9", 16 / 9],
  tall: ["Tall 9:16", 9 / 16],
};

export const usable = computed(() =>
  models.value.filter((model) => !model.problem && ["image", "video", "audio"].includes(model.media)),
);

const nameOf = (model: ModelInfo): string => (model.revision ? `${model.id}@${model.revision}` : model.id);

export { nameOf as modelName };

export const chosen = computed<ModelInfo | undefined>(
  () =>
    usable.value.find((model) => nameOf(model) === fields.model.value) ??
    usable.value.find((model) => model.isDefault) ??
    usable.value[0],
);

export const medium = computed<Medium>(() => (chosen.value?.media ?? "image") as Medium);

/** Sizes of as many pixels as the model's default, by shape. */
export const shapes = computed<{ shape: Shape; label: string; width: number; height: number }[]>(() => {
  const defaults = chosen.value?.defaults;
  const [width, height] = [defaults?.width || 1024, defaults?.height || 1024];
  const found = [{ shape: "default" as Shape, label: `Model's own, ${width} × ${height}`, width, height }];
  for (const [shape, [label, ratio]] of Object.entries(RATIOS)) {
    const size = {
      width: rounded(Math.sqrt(width * height * ratio)),
      height: rounded(Math.sqrt((width * height) / ratio)),
    };
    found.push({ shape: shape as Shape, label: `${label}, ${size.width} × ${size.height}`, ...size });
  }
  return found;
});

const rounded = (pixels: number): number => Math.max(MODULO, Math.round(pixels / MODULO) * MODULO);

const number = (text: string): number => (text.trim() === "" ? 0 : Number(text));
const optional = (text: string): number | undefined => (text.trim() === "" ? undefined : Number(text));

/** The size as chosen; zeros are the model's default. */
function sizeChosen(): { width: number; height: number } {
  if (fields.shape.value === "custom")
    return { width: number(fields.width.value), height: number(fields.height.value) };
  // With a picture to start from, the model's own may follow the picture.
  if (fields.shape.value === "default") return { width: 0, height: 0 };
  const { width, height } = shapes.value.find((each) => each.shape === fields.shape.value)!;
  return { width, height };
}

/** The request, as the form says it now. */
export function order(): Order | null {
  const model = chosen.value;
  if (!model) return null;
  const adapter = fields.adapter.value;
  const common = {
    model: {
      id: model.id,
      revision: model.revision,
      quantization: quantizationOf(fields.precision.value),
      adapters: adapter ? [{ id: adapter, strength: optional(fields.adapterStrength.value) }] : [],
    },
    prompt: fields.prompt.value,
    steps: number(fields.steps.value),
    seed: seedOf(fields.seed.value),
    count: number(fields.count.value) || 1,
    guidance: optional(fields.guidance.value),
    negativePrompt: fields.negative.value || undefined,
    trueGuidance: optional(fields.trueGuidance.value),
    strength: startPicture.value ? optional(fields.strength.value) : undefined,
  };
  switch (medium.value) {
    case "image":
      return { medium: "image", request: { ...common, ...sizeChosen(), initImage: startPicture.value?.bytes } };
    case "video":
      return {
        medium: "video",
        request: {
          ...common,
          ...sizeChosen(),
          frames: number(fields.frames.value),
          framesPerSecond: number(fields.rate.value),
          cards: optional(fields.cards.value),
          initImage: startPicture.value?.bytes,
        },
      };
    case "audio":
      return {
        medium: "audio",
        request: { ...common, strength: undefined, seconds: number(fields.seconds.value), lyrics: fields.lyrics.value },
      };
  }
}

function quantizationOf(precision: string): MessageInitShape<typeof QuantizationSchema> | undefined {
  if (!precision) return undefined;
  if (!precision.includes("=")) return { preset: precision };
  return { components: Object.fromEntries(precision.split(",").map((each) => each.split("=") as [string, string])) };
}

/** A quantization as the field has it. */
export function precisionOf(quantization: MessageInitShape<typeof QuantizationSchema> | undefined): string {
  const formats = Object.entries(quantization?.components ?? {}).sort();
  if (formats.length) return formats.map(([name, format]) => `${name}=${format}`).join(",");
  return quantization?.preset ?? "";
}

function seedOf(text: string): bigint | undefined {
  return /^\d{1,20}$/.test(text.trim()) ? BigInt(text.trim()) : undefined;
}

/** Fills the form with the settings of a run; the seed is that of a result. */
export function takeSettings(run: Run, result?: Result): void {
  const { order } = run;
  const { request } = order;
  const text = (value: number | undefined) => (value ? String(Number(value.toPrecision(6))) : "");
  const { model } = request;
  fields.model.value = model?.revision ? `${model.id}@${model.revision}` : (model?.id ?? "");
  fields.precision.value = precisionOf(model?.quantization);
  fields.prompt.value = request.prompt ?? "";
  fields.steps.value = text(request.steps);
  fields.seed.value = result?.seed ?? (request.seed === undefined ? "" : String(request.seed));
  fields.guidance.value = text(request.guidance);
  fields.negative.value = request.negativePrompt ?? "";
  fields.trueGuidance.value = text(request.trueGuidance);
  fields.strength.value = text(request.strength);
  fields.adapter.value = model?.adapters?.[0]?.id ?? "";
  fields.adapterStrength.value = text(model?.adapters?.[0]?.strength);
  if (order.medium === "audio") {
    fields.seconds.value = text(order.request.seconds);
    fields.lyrics.value = order.request.lyrics ?? "";
    return;
  }
  setSize(order.request.width ?? 0, order.request.height ?? 0);
  if (order.medium !== "video") return;
  fields.frames.value = text(order.request.frames);
  fields.rate.value = text(order.request.framesPerSecond);
  fields.cards.value = text(order.request.cards);
}

export function setSize(width: number, height: number): void {
  const same = shapes.value.find((each) => each.shape !== "default" && each.width === width && each.height === height);
  fields.shape.value = !width && !height ? "default" : (same?.shape ?? "custom");
  fields.width.value = width ? String(width) : "";
  fields.height.value = height ? String(height) : "";
}

export async function startFrom(name: string, file: Blob): Promise<void> {
  const bytes = new Uint8Array(await file.arrayBuffer());
  forgetStart();
  startPicture.value = { name, bytes, url: URL.createObjectURL(file) };
}

export function forgetStart(): void {
  const old = startPicture.value;
  startPicture.value = null;
  if (old) URL.revokeObjectURL(old.url);
}
