import type { Signal } from "@preact/signals";
import { pin, releaseReservation, trim, underWay, unload } from "../actions";
import { foreignHolders } from "../holders";
import { cards, connection, hostMemory, largestCard, mayAdminister } from "../live";
import type { CardStatus, ResidentComponent } from "../proto/moored/v1/residency_pb";
import { driverBytes, modelNumber } from "../timeline";
import { duration, size } from "../words";
import { Timeline } from "./timeline_chart";

const COLOURS = 6;

export const colourOf = (entry: string): string => `model-${modelNumber(entry) % COLOURS}`;

export function CardsView() {
  return (
    <>
      <div class="head">
        <h2>Cards</h2>
        <Machine />
      </div>
      {!cards.value.length && (
        <p class="empty">
          {connection.value === "there" ? "The service has no card." : "Asking the service for its cards."}
        </p>
      )}
      <div class="cards">
        {cards.value.map((card) => (
          <Card key={card.peek().id} card={card} />
        ))}
      </div>
    </>
  );
}

function Machine() {
  const host = hostMemory.value;
  if (!host) return null;
  return (
    <p class="quiet">
      The machine: {size(host.availableBytes)} of {size(host.totalBytes)} available; the service has{" "}
      {size(host.serviceBytes)}, its workers {size(host.workersBytes)}.
    </p>
  );
}

function Card({ card }: { card: Signal<CardStatus> }) {
  const { id, name, kind, state, memory, jobId, problem, workerRestarts, attention, policy } = card.value;
  const total = Number(memory?.total ?? 0);
  const used = total - Number(memory?.free ?? 0);
  return (
    <article class="card" aria-labelledby={`card-${id}`} data-card={id}>
      <div class="card-head">
        <h3 id={`card-${id}`}>
          {id} {name !== id && <span class="quiet">{name}</span>}
        </h3>
        <span class={`chip ${state}`}>{state}</span>
        <span
          class="quiet"
          title={[`Kind: ${kind}`, policy && `Policy: ${policy}`, attention && `Attention: ${attention}`]
            .filter(Boolean)
            .join("\n")}
        >
          {size(used)} of {size(total)} used{jobId && `, runs ${jobId}`}
        </span>
        {mayAdminister.value && Number(memory?.slack ?? 0) > 0 && (
          <button
            type="button"
            class="small"
            aria-label={`Free slack of ${id}`}
            title="Gives memory that the service keeps and does not use back to the driver"
            disabled={underWay.value.has(`trim ${id}`)}
            onClick={() => trim(id)}
          >
            Free slack
          </button>
        )}
      </div>
      {problem && <p class="problem">{problem}</p>}
      {workerRestarts > 0 && <p class="quiet">Worker restarts: {workerRestarts}</p>}
      <MemoryMap card={card.value} />
      <Claims card={card.value} />
      <Residents card={card.value} />
      <Timeline card={id} />
    </article>
  );
}

interface Segment {
  key: string;
  bytes: number;
  look: string;
  label: string;
  title: string;
}

function segmentsOf(card: CardStatus): Segment[] {
  const memory = card.memory;
  if (!memory) return [];
  const segments: Segment[] = [];
  const add = (key: string, bytes: number, look: string, label: string, title = label) => {
    if (bytes > 0) segments.push({ key, bytes, look, label, title: `${title}: ${size(bytes)}` });
  };
  for (const [index, holder] of foreignHolders(card).entries())
    add(`foreign ${index}`, holder.bytes, "foreign", holder.name);
  add("driver", driverBytes(card), "driver", "Driver", driverWords(card));
  let left = Number(memory.components);
  const residents = card.residents.toSorted((a, b) => ((a.entries[0] ?? "") < (b.entries[0] ?? "") ? -1 : 1));
  for (const resident of residents) {
    const component = resident.component;
    if (!component) continue;
    const bytes = Math.min(left, bytesOf(resident));
    left -= bytes;
    const entry = resident.entries[0] ?? "";
    const looks = [colourOf(entry), resident.streamed ? "streamed" : "", resident.state === "resident" ? "" : "moving"];
    add(component.id, bytes, looks.filter(Boolean).join(" "), component.name, titleOf(resident));
  }
  add("rest", left, "model-0", "Other components");
  add("scratch", Number(memory.scratch), "scratch", "Working memory");
  const free = Number(memory.free);
  const reserved = Math.min(
    free,
    card.reservations.reduce((sum, each) => sum + Number(each.bytes), 0),
  );
  add("free", free - reserved, "free", "Free");
  let unnamed = reserved;
  for (const reservation of card.reservations) {
    const bytes = Math.min(unnamed, Number(reservation.bytes));
    unnamed -= bytes;
    add(`reserved ${reservation.id}`, bytes, "reserved", `Reserved: ${reservation.label || "another program"}`);
  }
  return segments;
}

const bytesOf = (resident: ResidentComponent): number =>
  Number(resident.streamed?.residentBytes ?? resident.component?.bytes ?? 0);

function titleOf(resident: ResidentComponent): string {
  const what = `${resident.component?.name} of ${resident.entries.join(", ")}`;
  return resident.streamed ? `${what}, streamed` : resident.state === "resident" ? what : `${what}, ${resident.state}`;
}

function driverWords(card: CardStatus): string {
  const memory = card.memory!;
  const parts = [
    ["driver itself", memory.context],
    ["its libraries", memory.workspaces],
    ["kept for the next job", memory.slack],
    ["not known", memory.unexplained],
  ] as const;
  const said = parts.filter(([, bytes]) => bytes > 0n).map(([name, bytes]) => `${name} ${size(bytes)}`);
  return `Driver (${said.join(", ")})`;
}

/** The memory of a card, as long as it is large beside the other cards. */
function MemoryMap({ card }: { card: CardStatus }) {
  const total = Number(card.memory?.total ?? 0);
  if (!total) return null;
  const segments = segmentsOf(card);
  const told = segments.map((each) => each.title).join("; ");
  return (
    <>
      <div
        class="map"
        role="img"
        aria-label={`Memory of ${card.id}: ${told}`}
        style={{ width: `${(100 * total) / largestCard.value}%` }}
      >
        {segments.map((each) => (
          <span
            key={each.key}
            class={`segment ${each.look}`}
            style={{ flexGrow: each.bytes / total }}
            title={each.title}
          >
            <span>{each.label}</span>
          </span>
        ))}
      </div>
      <ul class="legend">
        {accountsOf(card).map(([look, name, bytes]) => (
          <li key={name} data-account={look}>
            <span class={`swatch ${look}`} aria-hidden="true" />
            {name} <strong>{size(bytes)}</strong>
          </li>
        ))}
      </ul>
    </>
  );
}

function accountsOf(card: CardStatus): [string, string, number][] {
  const memory = card.memory!;
  const reserved = card.reservations.reduce((sum, each) => sum + Number(each.bytes), 0);
  const all: [string, string, number][] = [
    ["foreign", "Other programs", Number(memory.foreign)],
    ["driver", "Driver", driverBytes(card)],
    ["all-models", "Models", Number(memory.components)],
    ["scratch", "Working memory", Number(memory.scratch)],
    ["reserved", "Reserved", reserved],
    ["free", "Free", Number(memory.free)],
  ];
  return all.filter(([look, , bytes]) => bytes > 0 || look === "free");
}

/** Who holds memory or has it reserved, by name. */
function Claims({ card }: { card: CardStatus }) {
  const holders = foreignHolders(card);
  const onHost = card.onHost.reduce((sum, each) => sum + Number(each.bytes), 0);
  if (!holders.length && !card.reservations.length && !onHost) return null;
  return (
    <ul class="claims">
      {holders.map((holder) => (
        <li key={holder.name}>
          {size(holder.bytes)} held by {holder.name}
        </li>
      ))}
      {card.reservations.map((reservation) => (
        <li key={reservation.id} data-reservation={reservation.id}>
          {size(reservation.bytes)} reserved for {reservation.label || "another program"}
          {reservation.processId > 0 && ` (process ${reservation.processId})`}, {duration(reservation.expiresInMs)} left
          {mayAdminister.value && (
            <button
              type="button"
              class="small"
              aria-label={`End the reservation for ${reservation.label || reservation.id}`}
              disabled={underWay.value.has(`release ${reservation.id}`)}
              onClick={() => releaseReservation(reservation.id, reservation.label || "another program")}
            >
              End
            </button>
          )}
        </li>
      ))}
      {onHost > 0 && <li>{size(onHost)} of streamed models in the machine's memory</li>}
    </ul>
  );
}

interface EntryParts {
  key: string;
  parts: ResidentComponent[];
}

/** Entries in memory; not those that have left, and of which another one keeps what the two share. */
function entriesOf(card: CardStatus): EntryParts[] {
  const byKey = new Map<string, ResidentComponent[]>();
  for (const resident of card.residents) {
    for (const key of resident.entries) byKey.set(key, [...(byKey.get(key) ?? []), resident]);
  }
  const entries = [...byKey].map(([key, parts]) => ({ key, parts }));
  const isCovered = (one: EntryParts) =>
    entries.some(
      (other) =>
        other !== one && other.parts.length > one.parts.length && one.parts.every((part) => other.parts.includes(part)),
    );
  return entries.filter((entry) => !isCovered(entry)).sort((a, b) => (a.key < b.key ? -1 : 1));
}

function Residents({ card }: { card: CardStatus }) {
  const entries = entriesOf(card);
  if (!entries.length) return <p class="quiet">No model is in memory.</p>;
  return (
    <ul class="entries">
      {entries.map((entry) => (
        <EntryRow key={entry.key} entry={entry} />
      ))}
    </ul>
  );
}

function EntryRow({ entry }: { entry: EntryParts }) {
  const { key, parts } = entry;
  const isPinned = parts.every((part) => part.pinned);
  const chips = [
    isPinned && "pinned",
    parts.some((part) => part.held) && "held",
    parts.some((part) => part.leases > 0) && "in use",
  ];
  const bytes = parts.reduce((sum, part) => sum + bytesOf(part), 0);
  return (
    <li class="entry" data-key={key}>
      <span class={`swatch ${colourOf(key)}`} aria-hidden="true" />
      <div class="entry-what">
        <p>
          <span class="key">{key}</span> <strong>{size(bytes)}</strong>{" "}
          {chips.filter(Boolean).map((chip) => (
            <span key={String(chip)} class="chip">
              {chip}
            </span>
          ))}
        </p>
        <p class="quiet">
          {parts
            .map(
              (part) =>
                `${part.component?.name} ${size(bytesOf(part))}${part.state === "resident" ? "" : ` ${part.state}`}`,
            )
            .join(", ")}
        </p>
        {parts
          .filter((part) => part.streamed)
          .map((part) => (
            <p key={part.component?.id} class="quiet">
              {part.component?.name} is streamed: {part.streamed!.words}
            </p>
          ))}
      </div>
      <EntryButtons entry={key} isPinned={isPinned} />
    </li>
  );
}

/** Pin and unload, where the role may. */
export function EntryButtons({ entry, isPinned }: { entry: string; isPinned: boolean }) {
  if (!mayAdminister.value) return null;
  const pinWord = isPinned ? "Unpin" : "Pin";
  return (
    <div class="row">
      <button
        type="button"
        class="small"
        aria-label={`${pinWord} ${entry}`}
        disabled={underWay.value.has(`pin ${entry}`)}
        onClick={() => pin(entry, isPinned)}
      >
        {pinWord}
      </button>
      <button
        type="button"
        class="small"
        aria-label={`Unload ${entry}`}
        disabled={underWay.value.has(`unload ${entry}`)}
        onClick={() => unload(entry)}
      >
        Unload
      </button>
    </div>
  );
}
