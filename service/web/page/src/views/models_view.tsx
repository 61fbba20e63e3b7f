import { useSignal } from "@preact/signals";
import { announce } from "../announcements";
import { load, underWay } from "../actions";
import { problemOf } from "../connection";
import {
  adapters,
  cards,
  connection,
  info,
  listModels,
  mayAdminister,
  mayGenerate,
  models,
  residentKeys,
} from "../live";
import { pull, pulling, stopPull } from "../pull";
import type { ModelInfo } from "../proto/moored/v1/residency_pb";
import { count, size } from "../words";
import { EntryButtons } from "./cards_view";
import { Field } from "./fields";

export const MEDIA: Record<string, string> = { image: "Pictures", video: "Films", audio: "Music" };

export function ModelsView() {
  const isLooking = useSignal(false);
  const look = async () => {
    isLooking.value = true;
    try {
      await listModels(true);
      announce(`Found ${count(models.value.length, "model", "models")}.`);
    } catch (error) {
      announce(problemOf(error).message, true);
    }
    isLooking.value = false;
  };
  return (
    <>
      <div class="head">
        <h2>Models</h2>
        <button type="button" class="small" disabled={isLooking.value} onClick={look}>
          Look for new models
        </button>
      </div>
      {!models.value.length && (
        <p class="empty">
          {connection.value === "there" ? "The service has no model." : "Asking the service for its models."}
        </p>
      )}
      <ul class="models">
        {models.value.map((model) => (
          <Model key={`${model.id}@${model.revision}`} model={model} />
        ))}
      </ul>
      <Adapters />
      {mayAdminister.value && info.value?.capabilities.includes("pull") && <Pull />}
    </>
  );
}

function Model({ model }: { model: ModelInfo }) {
  const keys = residentKeys.value.filter((key) => isOf(key, model));
  const bytes = model.components.reduce((sum, each) => sum + Number(each.bytes), 0);
  return (
    <li class="model" data-model={model.id}>
      <div class="model-head">
        <h3 class="key">{model.id}</h3>
        {model.media && <span class="chip">{MEDIA[model.media] ?? model.media}</span>}
        {model.family && <span class="quiet">{model.family}</span>}
        {model.isDefault && <span class="chip">default</span>}
      </div>
      {model.problem ? (
        <p class="problem">{model.problem}</p>
      ) : (
        <>
          <p class="quiet">
            {size(bytes)}: {model.components.map((each) => `${each.name} ${size(each.bytes)}`).join(", ")}
          </p>
          {keys.map((key) => (
            <div class="loaded" key={key} data-key={key}>
              <span>
                <span class="chip good">in memory</span> <span class="key">{key}</span>
              </span>
              <EntryButtons entry={key} isPinned={isPinned(key)} />
            </div>
          ))}
          {mayGenerate.value && <LoadButton model={model} />}
        </>
      )}
    </li>
  );
}

function isOf(key: string, model: ModelInfo): boolean {
  const named = model.revision ? `${model.id}@${model.revision}` : model.id;
  return key === named || key.startsWith(`${named}+`);
}

function isPinned(key: string): boolean {
  const parts = cards.value.flatMap((card) => card.value.residents.filter((each) => each.entries.includes(key)));
  return parts.length > 0 && parts.every((part) => part.pinned);
}

function LoadButton({ model }: { model: ModelInfo }) {
  const preset = useSignal("");
  const id = preset.value ? `${model.id}+${preset.value}` : model.id;
  return (
    <div class="row">
      {model.choices.length > 1 && (
        <label>
          <span class="unseen">Precision of {model.id}</span>
          <select value={preset.value} onChange={(event) => (preset.value = event.currentTarget.value)}>
            <option value="">as configured</option>
            {model.choices.map((choice) => (
              <option key={choice.preset} value={choice.preset}>
                {choice.preset}, {size(choice.bytes)}
              </option>
            ))}
          </select>
        </label>
      )}
      <button
        type="button"
        class="small"
        aria-label={`Load ${model.id}`}
        disabled={underWay.value.has(`load ${id}`)}
        onClick={() => load(id)}
      >
        {underWay.value.has(`load ${id}`) ? "Loading" : "Load"}
      </button>
    </div>
  );
}

function Adapters() {
  if (!adapters.value.length) return null;
  return (
    <>
      <h3>Adapters</h3>
      <ul class="adapters">
        {adapters.value.map((adapter) => (
          <li key={adapter.id}>
            <span class="key">{adapter.id}</span>{" "}
            <span class="quiet">
              {adapter.kind === "controlnet" ? "ControlNet" : "LoRA"}, {size(adapter.bytes)}
            </span>
          </li>
        ))}
      </ul>
    </>
  );
}

/** Downloads a model from the hub into the cache of the service's machine. */
function Pull() {
  const name = useSignal("");
  const under = pulling.value;
  const submit = (event: Event) => {
    event.preventDefault();
    void pull(name.value.trim());
  };
  return (
    <form class="pull" onSubmit={submit} aria-label="Pull a model">
      <h3>Pull a model from the hub</h3>
      <div class="row">
        <Field name="Name, as in owner/name">
          {(id) => (
            <input
              id={id}
              required
              autocomplete="off"
              spellcheck={false}
              value={name.value}
              onInput={(event) => (name.value = event.currentTarget.value)}
            />
          )}
        </Field>
        {under ? (
          <button type="button" onClick={stopPull}>
            Stop
          </button>
        ) : (
          <button type="submit">Pull</button>
        )}
      </div>
      {under && (
        <div class="pull-progress">
          <p class="quiet">
            {under.name}: {under.words}
          </p>
          {under.share < 0 ? (
            <progress aria-label={`Pull of ${under.name}`} />
          ) : (
            <progress aria-label={`Pull of ${under.name}`} max={1} value={under.share} />
          )}
        </div>
      )}
    </form>
  );
}
