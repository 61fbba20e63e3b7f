// Figures and names of the protos, for people.

const GIB = 2 ** 30;
const MIB = 2 ** 20;

/** Bytes: GiB from 0.1 on, else MiB, as the service's own messages have them. */
export function size(bytes: bigint | number): string {
  const number = Number(bytes);
  if (number === 0) return "0";
  return number >= GIB / 10 ? `${(number / GIB).toFixed(1)} GiB` : `${(number / MIB).toFixed(1)} MiB`;
}

export function duration(milliseconds: bigint | number): string {
  const seconds = Number(milliseconds) / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = seconds / 60;
  return minutes < 100 ? `${Math.round(minutes)} min` : `${Math.round(minutes / 60)} h`;
}

export function clock(time: number): string {
  return new Date(time).toLocaleTimeString([], { hour12: false });
}

export function count(number: number, one: string, several: string): string {
  return `${number} ${number === 1 ? one : several}`;
}

const STAGES: Record<string, string> = {
  encode_text: "encoding the text",
  encode_image: "encoding the picture",
  encode_end: "encoding the end picture",
  encode_vision: "encoding the picture for the transformer",
  encode_reference: "encoding the reference",
  encode_masked: "encoding the masked picture",
  encode_source: "encoding the source",
  encode_condition: "encoding lyrics and timbre",
  quantize_source: "quantizing the source",
  denoise: "denoising",
  decode: "decoding",
  decode_sound: "decoding the sound",
  load: "loading",
  restore: "restoring",
};

export const stageName = (stage: string): string => STAGES[stage] ?? stage.replaceAll("_", " ");

const KINDS: Record<string, string> = {
  GenerateImage: "Picture",
  GenerateVideo: "Film",
  GenerateAudio: "Track",
  StreamAudio: "Session of sound",
  Load: "Load",
  EncodeImage: "Encode",
  DecodeLatent: "Decode",
};

export const kindName = (kind: string): string => KINDS[kind] ?? kind;

const CAUSES: Record<string, string> = {
  late_eviction: "memory that was freed, and that the driver does not show as free yet",
  foreign: "memory that other programs hold",
  reservation: "memory that is reserved for another program",
};

export const causeName = (cause: string): string => CAUSES[cause] ?? cause;

/** A part of a file name: letters and digits of a text, at most 48 of them. */
export function slug(text: string): string {
  const plain = text
    .normalize("NFKD")
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-+|-+$/g, "");
  return [...plain].slice(0, 48).join("").replace(/-+$/, "");
}

export function sentence(words: string): string {
  return words.charAt(0).toUpperCase() + words.slice(1);
}
