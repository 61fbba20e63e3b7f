import { type Signal, signal, useSignalEffect } from "@preact/signals";
import { cancelJob, underWay } from "../actions";
import { jobs } from "../connection";
import { foreignHolders } from "../holders";
import { cards, connection, jobList, mayGenerate } from "../live";
import { Priority } from "../proto/moored/v1/generation_pb";
import type { JobInfo } from "../proto/moored/v1/residency_pb";
import { runOf, whomOf } from "../runs";
import { count, duration, kindName, stageName } from "../words";

const ENDED_STATES = ["done", "failed", "cancelled"];
const ENDED_EVERY_MS = 2000;

const ended = signal<JobInfo[]>([]);

export function QueueView() {
  return (
    <>
      <div class="head">
        <h2>Queue</h2>
        <Summary />
      </div>
      <Rows />
      <Ended />
    </>
  );
}

function Summary() {
  const states = jobList.value.map((job) => job.value.state);
  const said = ["running", "waiting", "queued"]
    .map((state) => [state, states.filter((each) => each === state).length] as const)
    .filter(([, number]) => number)
    .map(([state, number]) => `${number} ${state}`);
  return <p class="quiet">{said.join(", ")}</p>;
}

function Rows() {
  if (!jobList.value.length) return <p class="empty">No job is running or queued.</p>;
  return (
    <ul class="jobs">
      {jobList.value.map((job) => (
        <Row key={job.peek().id} job={job} />
      ))}
    </ul>
  );
}

const PRIORITIES: Partial<Record<Priority, string>> = {
  [Priority.LOW]: "low priority",
  [Priority.HIGH]: "high priority",
};

function Row({ job }: { job: Signal<JobInfo> }) {
  const { id, state, kind, modelKey, clientId, priority, card } = job.value;
  const from = [clientId ? `from ${clientId}` : "", card ? `on ${card}` : "", PRIORITIES[priority] ?? ""];
  return (
    <li class={`job ${state}`} data-job={id}>
      <Thumbnail job={id} kind={kind} />
      <div class="job-what">
        <p class="job-name">
          <strong>{kindName(kind)}</strong> <span class="key">{modelKey}</span>
        </p>
        <p class="quiet">{[id, ...from.filter(Boolean)].join(", ")}</p>
      </div>
      <div class="job-how">
        <Progress job={job} />
      </div>
      {mayGenerate.value && (
        <button
          type="button"
          class="small"
          aria-label={`Cancel ${id}`}
          disabled={underWay.value.has(`cancel ${id}`)}
          onClick={() => cancelJob(id)}
        >
          Cancel
        </button>
      )}
    </li>
  );
}

/** What the result looks like so far: of this page's own jobs, whose streams it has. */
function Thumbnail({ job, kind }: { job: string; kind: string }) {
  const run = runOf(job);
  const url = run?.preview.value;
  return (
    <div class="thumbnail">{url ? <img src={url} alt={`What ${job} looks like so far`} /> : <Icon kind={kind} />}</div>
  );
}

const ICONS: Record<string, string> = {
  GenerateImage: "M3 5h18v14H3zM3 16l5-5 5 5 3-3 5 5M15.5 9.5h.01",
  GenerateVideo: "M3 5h18v14H3zM7 5v14M17 5v14M3 9.5h4M3 14.5h4M17 9.5h4M17 14.5h4",
  GenerateAudio: "M9 18V5l11-2v13M9 18a3 3 0 1 1-6 0 3 3 0 0 1 6 0zM20 16a3 3 0 1 1-6 0 3 3 0 0 1 6 0z",
};

function Icon({ kind }: { kind: string }) {
  return (
    <svg viewBox="0 0 24 24" aria-hidden="true">
      <path d={ICONS[kind] ?? "M12 4v10M8 11l4 4 4-4M4 20h16"} />
    </svg>
  );
}

function Progress({ job }: { job: Signal<JobInfo> }) {
  const { state, stage, step, steps, queuePosition } = job.value;
  if (state === "queued") return <p>{queuePosition ? `queued, ${queuePosition} ahead` : "queued, next"}</p>;
  if (state === "waiting") return <WaitWords job={job} />;
  const words = stage ? stageName(stage) : state;
  if (!steps) return <p>{words}</p>;
  return (
    <>
      <p>
        {words}, step {step} of {steps}
      </p>
      <progress max={steps} value={step} aria-label={`Steps of ${job.value.id}`} />
    </>
  );
}

/** Whom a job waits for: as its stream says, where it is one of this page; else who holds memory of its card. */
function WaitWords({ job }: { job: Signal<JobInfo> }) {
  const waiting = runOf(job.value.id)?.waiting.value;
  if (waiting) {
    return (
      <p>
        waits for memory, {duration(waiting.patienceLeftMs)} left: {whomOf(waiting)}
      </p>
    );
  }
  const card = cards.value.find((each) => each.value.id === job.value.card);
  const names = card ? foreignHolders(card.value).map((holder) => holder.name) : [];
  return <p>waits for memory{names.length ? `; it is held by ${names.join(", ")}` : ""}</p>;
}

function Ended() {
  useSignalEffect(() => {
    // Each time that jobs come or go.
    void jobList.value;
    if (connection.value !== "there") return;
    const timer = setTimeout(
      async () => {
        try {
          const listed = await jobs.list({ includeEnded: true });
          ended.value = listed.jobs
            .filter((job) => ENDED_STATES.includes(job.state))
            .sort((a, b) => Number(a.ageMs - b.ageMs))
            .slice(0, 50);
        } catch {
          // The banner says that the service is gone.
        }
      },
      ended.peek().length ? ENDED_EVERY_MS : 0,
    );
    return () => clearTimeout(timer);
  });
  if (!ended.value.length) return null;
  return (
    <details class="ended">
      <summary>
        <h3>Ended: {count(ended.value.length, "job", "jobs")}</h3>
      </summary>
      <ul class="jobs">
        {ended.value.map((job) => (
          <li key={job.id} class={`job ${job.state}`}>
            <div class="job-what">
              <p class="job-name">
                <strong>{kindName(job.kind)}</strong> <span class="key">{job.modelKey}</span>
              </p>
              <p class="quiet">
                {[job.id, job.clientId && `from ${job.clientId}`, `${duration(job.ageMs)} ago`]
                  .filter(Boolean)
                  .join(", ")}
              </p>
            </div>
            <div class="job-how">
              <p>
                {job.state}
                {job.error && `: ${job.error}`}
              </p>
            </div>
          </li>
        ))}
      </ul>
    </details>
  );
}
