import type { Signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface FieldProps {
  name: string;
  isWide?: boolean;
  children: (id: string) => ComponentChildren;
}

/** A control with its label. */
export function Field({ name, isWide, children }: FieldProps) {
  const id = useId();
  return (
    <div class={isWide ? "field wide" : "field"}>
      <label for={id}>{name}</label>
      {children(id)}
    </div>
  );
}

interface NumberFieldProps {
  name: string;
  field: Signal<string>;
  standard?: number | undefined;
  placeholder?: string;
  required?: boolean;
  min?: number;
  max?: number;
  step?: number | "any";
}

/** A number; the placeholder is what an empty field means. */
export function NumberField({ name, field, standard, placeholder, required, min, max, step = 1 }: NumberFieldProps) {
  const shown = standard ? String(Number(standard.toPrecision(6))) : "";
  return (
    <Field name={name}>
      {(id) => (
        <input
          id={id}
          type="number"
          inputMode={step === 1 ? "numeric" : "decimal"}
          required={required}
          min={min}
          max={max}
          step={step}
          placeholder={placeholder ?? shown}
          value={field.value}
          onInput={(event) => (field.value = event.currentTarget.value)}
        />
      )}
    </Field>
  );
}
