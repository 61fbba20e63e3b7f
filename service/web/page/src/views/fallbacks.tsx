import { announce } from "../announcements";
import { fields, precisionOf, setSize } from "../form";
import type { Fallback } from "../proto/moored/v1/errors_pb";

/** Changes of the request, as buttons where the form has them. */
export function Fallbacks({ title, fallbacks }: { title: string; fallbacks: Fallback[] }) {
  if (!fallbacks.length) return null;
  return (
    <div class="fallbacks">
      <span class="quiet">{title}</span>
      {fallbacks.map((fallback) =>
        isInForm(fallback) ? (
          <button key={fallback.label} type="button" class="small" onClick={() => apply(fallback)}>
            {fallback.label}
          </button>
        ) : (
          <span key={fallback.label} class="chip">
            {fallback.label}
          </span>
        ),
      )}
    </div>
  );
}

function isInForm({ change }: Fallback): boolean {
  if (change.case === "quantization") return precisionOf(change.value) !== "";
  return change.case === "size";
}

function apply({ change, label }: Fallback): void {
  if (change.case === "quantization") fields.precision.value = precisionOf(change.value);
  if (change.case === "size") {
    const { width, height, frames, seconds } = change.value;
    if (width || height) setSize(width, height);
    if (frames) fields.frames.value = String(frames);
    if (seconds) fields.seconds.value = String(seconds);
  }
  announce(`The form has ${label} now.`);
}
