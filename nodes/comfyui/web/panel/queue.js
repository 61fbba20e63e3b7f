// The jobs of all who use the service.

import { Views, button, make, show, write, writeName } from "./dom.js";
import { fill, words } from "./words.js";

const nameOf = (job) => `${job.kind} ${job.id}`;

function stateOf(job) {
  if (job.state === "queued") {
    return job.position ? fill(words.jobs.position, { ahead: job.position }) : words.jobs.next;
  }
  return words.jobs[job.state] ?? job.state;
}

function doingOf(job) {
  if (job.state === "queued") return "";
  const stage = job.stage && (words.stages[job.stage] ?? job.stage);
  const step = job.steps && job.stage === "denoise" && fill(words.jobs.step, { step: job.step, steps: job.steps });
  return [stage, step].filter(Boolean).join(", ");
}

class JobView {
  constructor(job, actions) {
    this.state = make("span", { class: "moored-badge" });
    this.doing = make("p", { class: "moored-doing" });
    this.progress = make("progress", { "aria-label": words.stages.denoise });
    const client = fill(words.jobs.from, { client: job.client || words.jobs.anybody });
    const priority = job.priority && job.priority !== "normal" ? words.priorities[job.priority] : "";
    const cancel = button(words.jobs.cancel, () => actions.cancel(job.id), {
      "aria-label": fill(words.jobs.cancel_label, { job: nameOf(job) }),
    });
    const name = make("span", { class: "moored-name" });
    writeName(name, job.model || job.kind);
    this.element = make(
      "li",
      { class: "moored-job", "data-job": job.id },
      make("div", { class: "moored-row" }, name, this.state),
      this.doing,
      this.progress,
      make(
        "div",
        { class: "moored-row" },
        make("span", { class: "moored-small", text: [client, priority].filter(Boolean).join(", ") }),
        make("div", { class: "moored-buttons" }, cancel),
      ),
    );
  }

  update(job) {
    write(this.state, stateOf(job));
    this.state.dataset.state = job.state;
    const doing = doingOf(job);
    write(this.doing, doing);
    show(this.doing, doing !== "");
    const counts = job.stage === "denoise" && job.steps > 0;
    show(this.progress, counts);
    if (counts) {
      this.progress.max = job.steps;
      this.progress.value = job.step;
    }
  }
}

export class QueueView {
  constructor(actions) {
    const list = make("ul", { class: "moored-jobs", "aria-label": words.jobs.title });
    this.jobs = new Views(list, (job) => job.id, (job) => new JobView(job, actions));
    this.none = make("p", { class: "moored-small", text: words.jobs.none });
    this.element = make("section", { "aria-label": words.jobs.title }, make("h3", { text: words.jobs.title }), this.none, list);
  }

  update(jobs) {
    this.jobs.update(jobs);
    show(this.none, jobs.length === 0);
  }
}
