import { useSignal } from "@preact/signals";
import { startFrom, takeSettings } from "../form";
import { remove, type Result, type Run, runs, whomOf } from "../runs";
import { sentence, size, stageName } from "../words";
import { Fallbacks } from "./fallbacks";

export function Runs() {
  return (
    <div class="runs">
      <h2 class="unseen">Results</h2>
      {!runs.value.length && <p class="empty">What you generate comes here. It stays until this page is closed.</p>}
      {runs.value.map((run) => (
        <RunCard key={run.id} run={run} />
      ))}
    </div>
  );
}

function RunCard({ run }: { run: Run }) {
  const title = `run-${run.id}`;
  const state = run.state.value;
  return (
    <article class={`run ${state}`} aria-labelledby={title} data-run={run.jobId.value || run.id}>
      <div class="run-head">
        <h3 id={title}>{run.prompt || "No prompt"}</h3>
        <p class="quiet">
          <span class="key">{run.modelKey.value || run.modelId}</span>
          {run.jobId.value && `, ${run.jobId.value}`}
        </p>
      </div>
      <RunMedia run={run} />
      <div class="run-foot">
        <div class="run-words">
          <RunWords run={run} />
        </div>
        <RunButtons run={run} />
      </div>
    </article>
  );
}

function RunWords({ run }: { run: Run }) {
  const waiting = run.waiting.value;
  const problem = run.problem.value;
  return (
    <>
      {!problem && <p>{run.words.value}</p>}
      {!run.isOver && <Bar run={run} />}
      {waiting && (
        <div class="wait-words">
          <p>
            {sentence(stageName(waiting.stage))} needs {size(waiting.neededBytes)}, {size(waiting.freeBytes)} are
            usable.
          </p>
          <p>Held by {whomOf(waiting)}.</p>
        </div>
      )}
      {problem && (
        <>
          <p class="problem">{problem.message}</p>
          {problem.fields.map((each) => (
            <p key={each.field} class="quiet">
              {each.field}: {each.description}
            </p>
          ))}
          <Fallbacks title="This would fit:" fallbacks={problem.fallbacks} />
        </>
      )}
      {run.notes.value.map((note) => (
        <p key={note} class="quiet">
          {note}
        </p>
      ))}
    </>
  );
}

function Bar({ run }: { run: Run }) {
  const done = run.progress.value;
  const name = `Progress of ${run.jobId.value || "the job"}`;
  return done < 0 ? <progress aria-label={name} /> : <progress aria-label={name} max={1} value={done} />;
}

function RunMedia({ run }: { run: Run }) {
  const results = run.results.value;
  const preview = run.preview.value;
  if (!results.length && !preview) return null;
  return (
    <div class={results.length + (preview ? 1 : 0) > 1 ? "media several" : "media"}>
      {results.map((result) => (
        <Shown key={result.url} run={run} result={result} />
      ))}
      {preview && <img class="growing" src={preview} alt="What it looks like so far" />}
    </div>
  );
}

function Shown({ run, result }: { run: Run; result: Result }) {
  const name = run.prompt || run.modelId;
  const isPicture = result.mediaType.startsWith("image/");
  return (
    <figure class="result">
      {isPicture && (
        <a href={result.url} target="_blank" rel="noreferrer" aria-label={`Open in a new tab: ${name}`}>
          <img src={result.url} alt={name} style={look(result)} />
        </a>
      )}
      {result.mediaType.startsWith("video/") && (
        <video src={result.url} controls loop playsInline aria-label={name} style={look(result)} />
      )}
      {result.mediaType.startsWith("audio/") && <audio src={result.url} controls aria-label={name} />}
      <figcaption>
        <span class="quiet">
          {result.track && `${result.track}, `}
          {result.width > 0 && `${result.width} × ${result.height}, `}
          {result.seed && `seed ${result.seed}`}
        </span>
        <a class="button small" href={result.url} download={result.fileName}>
          Download<span class="unseen"> {result.fileName}</span>
        </a>
        {isPicture && (
          <button type="button" class="small" onClick={() => startFrom(result.fileName, result.blob)}>
            Start from this
          </button>
        )}
      </figcaption>
    </figure>
  );
}

/** As large as it is, and small ones large enough to see. */
function look({ width, height }: Result) {
  return { width: `max(${width}px, 16rem)`, aspectRatio: `${width} / ${height}` };
}

function RunButtons({ run }: { run: Run }) {
  const isCancelling = useSignal(false);
  if (!run.isOver) {
    return (
      <button
        type="button"
        class="small"
        aria-label={`Cancel: ${run.prompt || run.modelId}`}
        disabled={isCancelling.value}
        onClick={async () => {
          isCancelling.value = true;
          await run.cancel();
          isCancelling.value = false;
        }}
      >
        Cancel
      </button>
    );
  }
  return (
    <div class="row">
      <button type="button" class="small" onClick={() => takeSettings(run, run.results.value[0])}>
        Use these settings
      </button>
      <button
        type="button"
        class="small"
        aria-label={`Remove: ${run.prompt || run.modelId}`}
        onClick={() => remove(run)}
      >
        Remove
      </button>
    </div>
  );
}
