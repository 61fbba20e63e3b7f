// What buttons do to the service, and what is said of it.

import { signal } from "@preact/signals";
import { announce } from "./announcements";
import { CLIENT_ID, jobs, problemOf, residency } from "./connection";
import { jobList, listModels } from "./live";
import { size } from "./words";

/** A question that is asked before something is lost. */
export interface Question {
  text: string;
  yes: string;
  no: string;
  act: () => void;
}

export const question = signal<Question | null>(null);

/** Actions under way, by their label: their buttons wait. */
export const underWay = signal<ReadonlySet<string>>(new Set());

async function run(label: string, action: () => Promise<string>): Promise<void> {
  if (underWay.value.has(label)) return;
  underWay.value = new Set([...underWay.value, label]);
  try {
    announce(await action());
  } catch (error) {
    announce(problemOf(error).message, true);
  } finally {
    underWay.value = new Set([...underWay.value].filter((each) => each !== label));
  }
}

/** Jobs that use an entry. */
const users = (key: string): number => jobList.value.filter((job) => job.value.modelKey === key).length;

export function unload(key: string): void {
  const using = users(key);
  if (!using) {
    void unloadNow(key, false);
    return;
  }
  question.value = {
    text: `Jobs use ${key}: ${using}. Unloading cancels them.`,
    yes: "Cancel jobs and unload",
    no: "Keep",
    act: () => void unloadNow(key, true),
  };
}

function unloadNow(key: string, force: boolean): Promise<void> {
  return run(`unload ${key}`, async () => {
    const done = await residency.unload({ model: { id: key }, force, clientId: CLIENT_ID });
    const freed = done.freed.reduce((sum, each) => sum + Number(each.freedBytes), 0);
    const kept = done.kept.map((each) => `${each.component?.name} (${each.reason})`);
    return `Unloaded ${key}: ${size(freed)} came free.${kept.length ? ` Stayed: ${kept.join(", ")}.` : ""}`;
  });
}

export function pin(key: string, isPinned: boolean): Promise<void> {
  return run(`pin ${key}`, async () => {
    await residency.pin({ model: { id: key }, unpin: isPinned });
    void listModels();
    return isPinned ? `Unpinned ${key}.` : `Pinned ${key}.`;
  });
}

export function load(id: string): Promise<void> {
  return run(`load ${id}`, async () => {
    let took = 0n;
    for await (const event of residency.load({ model: { id }, options: { clientId: CLIENT_ID } })) {
      if (event.event.case === "done") took = event.event.value.totalMs;
    }
    return `Loaded ${id} in ${(Number(took) / 1000).toFixed(1)} s.`;
  });
}

export function cancelJob(jobId: string): Promise<void> {
  return run(`cancel ${jobId}`, async () => {
    const { cancelled } = await jobs.cancel({ jobId, clientId: CLIENT_ID });
    return cancelled ? `Cancelled ${jobId}.` : `${jobId} had ended already.`;
  });
}

export function trim(card: string): Promise<void> {
  return run(`trim ${card}`, async () => {
    const { freedBytes } = await residency.trim({ card });
    return `${size(freedBytes)} came free on ${card}.`;
  });
}

export function releaseReservation(id: string, label: string): Promise<void> {
  return run(`release ${id}`, async () => {
    const { released } = await residency.releaseReservation({ reservationId: id });
    return released ? `The reservation for ${label} ended.` : "It had ended already.";
  });
}
