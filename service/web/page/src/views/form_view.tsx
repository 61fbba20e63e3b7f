import { useRef } from "preact/hooks";
import {
  chosen,
  fields,
  forgetStart,
  medium,
  modelName,
  MODULO,
  order,
  type Shape,
  shapes,
  startFrom,
  startPicture,
  usable,
} from "../form";
import { adapters, connection } from "../live";
import { start } from "../runs";
import { size } from "../words";
import { Field, NumberField } from "./fields";
import { MEDIA } from "./models_view";
import { PlanLine } from "./plan_line";

const VERBS = { image: "Generate picture", video: "Generate film", audio: "Generate track" };

export function Form() {
  const form = useRef<HTMLFormElement>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    const wanted = order();
    if (!wanted || !form.current) return;
    if (!form.current.checkValidity()) {
      // A field that is folded away cannot say what is wrong with it.
      const folded = form.current.querySelector("details");
      if (folded?.querySelector(":invalid")) folded.open = true;
      form.current.reportValidity();
      return;
    }
    start(wanted, chosen.value?.id ?? "");
    // On a phone results are below the form.
    if (matchMedia("(max-width: 48rem)").matches) {
      requestAnimationFrame(() => document.querySelector(".run")?.scrollIntoView());
    }
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return (
    <form class="form" ref={form} noValidate onSubmit={submit} onKeyDown={keys} aria-label="Generate">
      <Field name="Prompt">
        {(id) => (
          <textarea
            id={id}
            rows={4}
            maxLength={10000}
            value={fields.prompt.value}
            onInput={(event) => (fields.prompt.value = event.currentTarget.value)}
          />
        )}
      </Field>
      <ModelField />
      {medium.value !== "audio" && <SizeFields />}
      {medium.value === "audio" && <Lyrics />}
      <div class="fields">
        {medium.value === "video" && (
          <NumberField name="Frames" field={fields.frames} standard={chosen.value?.defaults?.frames} min={1} />
        )}
        {medium.value === "audio" && (
          <NumberField
            name="Seconds"
            field={fields.seconds}
            standard={chosen.value?.defaults?.seconds}
            min={0.1}
            step="any"
          />
        )}
        <NumberField name="Steps" field={fields.steps} standard={chosen.value?.defaults?.steps} min={1} max={200} />
        <NumberField name="Seed" field={fields.seed} placeholder="random" min={0} max={2 ** 53} />
        <NumberField name="Count" field={fields.count} standard={1} min={1} max={64} />
      </div>
      {medium.value !== "audio" && <StartPicture />}
      <More />
      <PlanLine />
      <div class="row">
        <button type="submit" class="main" disabled={!chosen.value || connection.value !== "there"}>
          {VERBS[medium.value]}
        </button>
        <span class="quiet hint">Ctrl + Enter</span>
      </div>
    </form>
  );
}

function ModelField() {
  const groups = Object.entries(MEDIA).map(
    ([media, name]) => [name, usable.value.filter((model) => model.media === media)] as const,
  );
  return (
    <Field name="Model">
      {(id) => (
        <select
          id={id}
          value={chosen.value ? modelName(chosen.value) : ""}
          onChange={(event) => {
            fields.model.value = event.currentTarget.value;
            // They were of the other model.
            for (const field of [
              fields.steps,
              fields.guidance,
              fields.frames,
              fields.rate,
              fields.cards,
              fields.seconds,
              fields.precision,
            ])
              field.value = "";
          }}
        >
          {!usable.value.length && <option value="">No model can be used</option>}
          {groups
            .filter(([, found]) => found.length)
            .map(([name, found]) => (
              <optgroup key={name} label={name}>
                {found.map((model) => (
                  <option key={modelName(model)} value={modelName(model)}>
                    {model.id}
                  </option>
                ))}
              </optgroup>
            ))}
        </select>
      )}
    </Field>
  );
}

function SizeFields() {
  return (
    <div class="fields">
      <Field name="Size" isWide>
        {(id) => (
          <select
            id={id}
            value={fields.shape.value}
            onChange={(event) => {
              const shape = event.currentTarget.value as Shape;
              const before = shapes.value.find((each) => each.shape === fields.shape.value) ?? shapes.value[0]!;
              fields.shape.value = shape;
              if (shape !== "custom" || fields.width.value) return;
              fields.width.value = String(before.width);
              fields.height.value = String(before.height);
            }}
          >
            {shapes.value.map((each) => (
              <option key={each.shape} value={each.shape}>
                {each.label}
              </option>
            ))}
            <option value="custom">Other</option>
          </select>
        )}
      </Field>
      {fields.shape.value === "custom" && (
        <>
          <NumberField name="Width" field={fields.width} min={MODULO} max={4096} step={MODULO} />
          <NumberField name="Height" field={fields.height} min={MODULO} max={4096} step={MODULO} />
        </>
      )}
    </div>
  );
}

function Lyrics() {
  return (
    <Field name="Lyrics, if it is sung">
      {(id) => (
        <textarea
          id={id}
          rows={3}
          value={fields.lyrics.value}
          onInput={(event) => (fields.lyrics.value = event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

function StartField() {
  const choose = async (input: HTMLInputElement) => {
    const file = input.files?.[0];
    if (file) await startFrom(file.name, file);
    // The same file may be chosen again after it was removed.
    input.value = "";
  };
  return (
    <Field name={medium.value === "video" ? "First frame, a picture" : "Picture to start from"}>
      {(id) => (
        <input
          id={id}
          type="file"
          accept="image/png,image/jpeg,image/webp"
          onChange={(event) => choose(event.currentTarget)}
        />
      )}
    </Field>
  );
}

function StartPicture() {
  const picture = startPicture.value;
  if (!picture) return null;
  return (
    <div class="start-picture">
      <img src={picture.url} alt={`Starts from ${picture.name}`} />
      <div>
        <p class="quiet">Starts from {picture.name}</p>
        <NumberField name="Strength" field={fields.strength} placeholder="model's" min={0.01} max={1} step="any" />
        <button type="button" class="small" onClick={forgetStart}>
          Remove picture
        </button>
      </div>
    </div>
  );
}

function More() {
  const model = chosen.value;
  const loras = adapters.value.filter((adapter) => adapter.kind !== "controlnet");
  return (
    <details class="more">
      <summary>More</summary>
      {medium.value !== "audio" && <StartField />}
      <div class="fields">
        {(model?.choices.length ?? 0) > 0 && (
          <Field name="Precision" isWide>
            {(id) => (
              <select
                id={id}
                value={fields.precision.value}
                onChange={(event) => (fields.precision.value = event.currentTarget.value)}
              >
                <option value="">As configured</option>
                <option value="auto">The best that fits (auto)</option>
                {fields.precision.value.includes("=") && (
                  <option value={fields.precision.value}>{fields.precision.value}</option>
                )}
                {model!.choices.map((choice) => (
                  <option key={choice.preset} value={choice.preset}>
                    {choice.preset}, {size(choice.bytes)}
                  </option>
                ))}
              </select>
            )}
          </Field>
        )}
        <NumberField
          name="Guidance"
          field={fields.guidance}
          standard={model?.defaults?.guidance}
          min={0}
          max={1000}
          step="any"
        />
        {medium.value === "video" && (
          <>
            <NumberField
              name="Frames a second"
              field={fields.rate}
              standard={model?.defaults?.framesPerSecond}
              min={0.1}
              step="any"
            />
            <NumberField name="Cards" field={fields.cards} standard={1} min={1} max={2} />
          </>
        )}
      </div>
      <Field name="Negative prompt: what to lead away from">
        {(id) => (
          <textarea
            id={id}
            rows={2}
            maxLength={10000}
            value={fields.negative.value}
            onInput={(event) => (fields.negative.value = event.currentTarget.value)}
          />
        )}
      </Field>
      <div class="fields">
        <NumberField
          name="Negative guidance"
          field={fields.trueGuidance}
          placeholder="over 1"
          required={fields.negative.value !== ""}
          min={0}
          max={1000}
          step="any"
        />
        {loras.length > 0 && (
          <>
            <Field name="LoRA" isWide>
              {(id) => (
                <select
                  id={id}
                  value={fields.adapter.value}
                  onChange={(event) => (fields.adapter.value = event.currentTarget.value)}
                >
                  <option value="">None</option>
                  {loras.map((adapter) => (
                    <option key={adapter.id} value={adapter.id}>
                      {adapter.id}
                    </option>
                  ))}
                </select>
              )}
            </Field>
            {fields.adapter.value && (
              <NumberField
                name="Its strength"
                field={fields.adapterStrength}
                standard={1}
                min={-100}
                max={100}
                step="any"
              />
            )}
          </>
        )}
      </div>
    </details>
  );
}
