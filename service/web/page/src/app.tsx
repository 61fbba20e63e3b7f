import { computed, signal, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { announcements, dismiss } from "./announcements";
import { question } from "./actions";
import { forgetToken, hasToken, keepToken, tokenWanted } from "./connection";
import { cards, connection, info, jobList, mayGenerate, nextAttempt, tryNow } from "./live";
import { chooseTheme, type Theme, theme } from "./theme";
import { CardsView } from "./views/cards_view";
import { GenerateView } from "./views/generate_view";
import { ModelsView } from "./views/models_view";
import { QueueView } from "./views/queue_view";

type View = "generate" | "cards" | "queue" | "models";

const NAMES: Record<View, string> = { generate: "Generate", cards: "Cards", queue: "Queue", models: "Models" };

const asked = signal<View | null>(viewOfAddress());

function viewOfAddress(): View | null {
  const name = location.hash.slice(1);
  return name in NAMES ? (name as View) : null;
}

window.addEventListener("hashchange", () => {
  asked.value = viewOfAddress() ?? asked.value;
});

const views = computed<View[]>(() =>
  mayGenerate.value ? ["generate", "cards", "queue", "models"] : ["cards", "queue", "models"],
);
const view = computed<View>(() => (asked.value && views.value.includes(asked.value) ? asked.value : views.value[0]!));

export function show(name: View): void {
  asked.value = name;
  history.replaceState(null, "", `#${name}`);
}

export function App() {
  return (
    <>
      <header class="top">
        <h1 class="mark">moored</h1>
        <Tabs />
        <div class="top-end">
          <State />
          <Account />
          <ThemeChoice />
        </div>
      </header>
      <Gone />
      <main>
        {views.value.map((name) => (
          <section
            key={name}
            id={`view-${name}`}
            role="tabpanel"
            aria-labelledby={`tab-${name}`}
            hidden={view.value !== name}
            tabIndex={-1}
          >
            <Panel name={name} isShown={view.value === name} />
          </section>
        ))}
      </main>
      <Announcements />
      <QuestionDialog />
      <TokenDialog />
    </>
  );
}

function Panel({ name, isShown }: { name: View; isShown: boolean }) {
  // The form keeps what was typed; the others are made anew, and cost nothing while they are not seen.
  if (name === "generate") return <GenerateView isShown={isShown} />;
  if (!isShown) return null;
  if (name === "cards") return <CardsView />;
  if (name === "queue") return <QueueView />;
  return <ModelsView />;
}

function Tabs() {
  const list = useRef<HTMLDivElement>(null);
  const move = (event: KeyboardEvent) => {
    const at = views.value.indexOf(view.value);
    const steps: Record<string, number> = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1 + views.value.length,
      Home: 0,
      End: views.value.length - 1,
    };
    const to = steps[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const name = views.value[to % views.value.length]!;
    show(name);
    list.current?.querySelector<HTMLElement>(`#tab-${name}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Views" ref={list} onKeyDown={move}>
      {views.value.map((name) => (
        <button
          key={name}
          type="button"
          id={`tab-${name}`}
          role="tab"
          aria-selected={view.value === name}
          aria-controls={`view-${name}`}
          tabIndex={view.value === name ? 0 : -1}
          onClick={() => show(name)}
        >
          <span>{NAMES[name]}</span>
          {name === "queue" && <JobCount />}
        </button>
      ))}
    </div>
  );
}

function JobCount() {
  const jobs = jobList.value.length;
  if (!jobs) return null;
  return (
    <span class="badge">
      {jobs}
      <span class="unseen"> jobs</span>
    </span>
  );
}

function State() {
  const state = connection.value;
  const ready = cards.value.filter((card) => ["ready", "busy"].includes(card.value.state)).length;
  const words = {
    asking: "Connecting",
    there: `${ready} of ${cards.value.length} ${cards.value.length === 1 ? "card" : "cards"} ready`,
    gone: "No connection",
    token: "Token needed",
  }[state];
  const version = info.value?.version;
  return (
    <span class="state" title={version ? `moored ${version}` : undefined}>
      <span class={`dot ${state === "there" && ready ? "good" : state === "asking" ? "" : "bad"}`} aria-hidden="true" />
      {words}
    </span>
  );
}

function Account() {
  const account = info.value?.account;
  if (!account && !hasToken.value) return null;
  return (
    <span class="account">
      {account && (
        <span>
          <span class="unseen">Signed in as </span>
          {account}
          {info.value?.role && <span class="quiet">, may {info.value.role}</span>}
        </span>
      )}
      {hasToken.value && (
        <button
          type="button"
          class="small"
          onClick={() => {
            forgetToken();
            info.value = null;
            tryNow();
          }}
        >
          Forget token
        </button>
      )}
    </span>
  );
}

function ThemeChoice() {
  return (
    <label class="theme">
      <span class="unseen">Colours</span>
      <select value={theme.value} onChange={(event) => chooseTheme(event.currentTarget.value as Theme)}>
        <option value="system">System</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
  );
}

function Gone() {
  const left = useSignal(0);
  useSignalEffect(() => {
    if (connection.value !== "gone") return;
    const tell = () => {
      left.value = Math.max(0, Math.ceil((nextAttempt.value - Date.now()) / 1000));
    };
    tell();
    const timer = setInterval(tell, 500);
    return () => clearInterval(timer);
  });
  return (
    <div role="alert" class="alert-place">
      {connection.value === "gone" && (
        <div class="banner">
          <span>
            No service answers at {location.host}. What you see is its last state; the page tries again by itself.
          </span>
          <span class="quiet" aria-hidden="true">
            {left.value ? `In ${left.value} s` : "Now"}
          </span>
          <button type="button" class="small" onClick={tryNow}>
            Try now
          </button>
        </div>
      )}
    </div>
  );
}

function Announcements() {
  return (
    <div class="announcements" role="status">
      {announcements.value.map((each) => (
        <div key={each.id} class={each.isError ? "announcement error" : "announcement"}>
          <span>{each.text}</span>
          <button type="button" class="small plain" aria-label="Close this message" onClick={() => dismiss(each.id)}>
            ×
          </button>
        </div>
      ))}
    </div>
  );
}

function QuestionDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const asking = question.value;
  useEffect(() => {
    if (asking) dialog.current?.showModal();
    else dialog.current?.close();
  }, [asking]);
  return (
    <dialog ref={dialog} role="alertdialog" aria-labelledby="question" onClose={() => (question.value = null)}>
      <p id="question">{asking?.text}</p>
      <div class="row end">
        <button type="button" autofocus onClick={() => (question.value = null)}>
          {asking?.no}
        </button>
        <button
          type="button"
          class="danger"
          onClick={() => {
            const { act } = asking!;
            question.value = null;
            act();
          }}
        >
          {asking?.yes}
        </button>
      </div>
    </dialog>
  );
}

function TokenDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const wanted = tokenWanted.value;
  useEffect(() => {
    if (wanted !== "no") dialog.current?.showModal();
    else dialog.current?.close();
  }, [wanted]);
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const given = new FormData(form);
    forgetToken();
    keepToken(String(given.get("token")), given.has("remember"));
    form.reset();
    tryNow();
  };
  return (
    <dialog ref={dialog} aria-labelledby="token-title" onCancel={(event) => event.preventDefault()}>
      <form onSubmit={submit}>
        <h2 id="token-title">This service asks for a token</h2>
        <p id="token-why" class={wanted === "refused" ? "problem" : "quiet"}>
          {wanted === "refused"
            ? "The service does not know this token. It may have been withdrawn."
            : "Who runs the service makes one: moored token make NAME --role generate"}
        </p>
        <label class="field">
          <span>Token</span>
          <input
            name="token"
            type="password"
            required
            autocomplete="off"
            spellcheck={false}
            aria-describedby="token-why"
          />
        </label>
        <label class="check">
          <input name="remember" type="checkbox" />
          <span>Remember it in this browser</span>
        </label>
        <div class="row end">
          <button type="submit" class="main">
            Use token
          </button>
        </div>
      </form>
    </dialog>
  );
}
