// The panel's words. Other languages are in locales/<language>/main.json, under `moored`, with the same keys.

export const words = {
  tab_tip: "moored: GPU memory, and the queue",
  connecting: "Asking the service…",
  comfyui_gone: "ComfyUI's server does not answer. The panel tries again by itself.",
  down: "No connection to the service",
  try_now: "Try now",
  start: "Start one here",
  trying: "The panel tries again by itself.",
  no_cards: "The service has no GPU.",
  test: { button: "Test", asking: "Asking the service…" },
  attention: "Attention: {by}",
  memory: {
    components: "Models",
    scratch: "Working memory",
    foreign: "Other programs",
    other: "Driver",
    free: "Free",
    context: "driver itself",
    workspaces: "its libraries",
    slack: "kept for the next job",
    unexplained: "not known",
    of: "{used} of {total} used",
    holds: "{bytes} held by {name}",
    reserved: "{bytes} reserved for {label}, {time} left",
    host: "The machine's memory holds {bytes} of streamed models",
    restarts: "Worker restarts: {count}",
  },
  card_states: {
    starting: "starting",
    ready: "ready",
    busy: "busy",
    restarting: "restarting",
  },
  entries: {
    title: "In memory",
    none: "No model is in memory.",
    pin: "Pin",
    unpin: "Unpin",
    unload: "Unload",
    pin_label: "Pin {model}",
    unpin_label: "Unpin {model}",
    unload_label: "Unload {model}",
    pinned: "pinned",
    held: "held",
    in_use: "in use",
    wanted: "wanted",
    loading: "loading",
    evicting: "leaving",
    shared: "{name} (shared)",
    confirm: "Jobs use it: {count}. Unloading cancels them.",
    confirm_yes: "Cancel jobs and unload",
    confirm_no: "Keep",
  },
  jobs: {
    title: "Queue",
    none: "No job is running or queued.",
    cancel: "Cancel",
    cancel_label: "Cancel {job}",
    position: "queued, {ahead} ahead",
    next: "queued, next",
    waiting: "waiting for memory",
    running: "running",
    step: "step {step} of {steps}",
    from: "from {client}",
    anybody: "unnamed client",
  },
  priorities: { low: "low priority", normal: "normal priority", high: "high priority" },
  stages: {
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
  },
  said: {
    unloaded: "Unloaded {model}: {bytes} came free.",
    kept: "Stayed: {parts}.",
    pinned: "Pinned {model}.",
    unpinned: "Unpinned {model}.",
    cancelled: "Cancelled {job}.",
    ended: "{job} had ended already.",
    failed: "That failed: {why}",
  },
};

// Takes the words of a language where ComfyUI has them (`/i18n`); what it lacks stays English.
export function chooseLanguage(translations, locale) {
  const found = translations?.[locale]?.moored;
  if (found) merge(words, found);
}

function merge(into, from) {
  for (const [key, value] of Object.entries(from)) {
    if (!Object.hasOwn(into, key)) continue;
    if (typeof into[key] === "string") {
      if (typeof value === "string") into[key] = value;
    } else if (value && typeof value === "object") merge(into[key], value);
  }
}

export const fill = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));

// As the client's own words for events: GiB from 0.1 on, else MiB.
export function size(bytes) {
  if (bytes === 0) return "0";
  const [unit, name] = bytes >= 2 ** 30 / 10 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(bytes / unit).toFixed(1)} ${name}`;
}

export function time(milliseconds) {
  const seconds = milliseconds / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  return seconds < 100 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}
