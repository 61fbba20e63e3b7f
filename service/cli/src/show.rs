//! The events of a job: as bars on a terminal, as lines in a pipe, or as JSON.

use std::io::IsTerminal as _;

use api::v1;
use api::v1::event::Event as Kind;
use indicatif::{ProgressBar, ProgressStyle};
use residency::Bytes;

use crate::arguments::Verbosity;
use crate::{CliError, screen};

/// Shows events one by one.
pub(super) struct Show {
    form: Form,
    bar: Option<Shown>,
    /// Name of the stage that runs.
    stage: String,
    last_line: String,
    last_loaded: String,
}

/// A bar on the screen.
struct Shown {
    title: String,
    template: &'static str,
    bar: ProgressBar,
}

/// How far the steps of a job are: over all sections of a film, so that the time left is that of the film.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Steps {
    done: u64,
    of: u64,
}

impl Steps {
    fn of(step: &v1::Step) -> Steps {
        let (of, before) = (u64::from(step.of), u64::from(step.part.saturating_sub(1)));
        Steps {
            done: before * of + u64::from(step.n),
            of: u64::from(step.parts.max(1)) * of,
        }
    }
}

/// About as many lines are printed for the steps of a job.
const LINES_OF_STEPS: u64 = 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Bars,
    Lines,
    Json,
    Silent,
}

impl Show {
    /// Chooses the form by the kind of the output.
    pub(super) fn new(json: bool) -> Show {
        let form = match (json, std::io::stderr().is_terminal()) {
            (true, _) => Form::Json,
            (false, _) if screen::verbosity() == Verbosity::Quiet => Form::Silent,
            (false, true) => Form::Bars,
            (false, false) => Form::Lines,
        };
        Show::of(form)
    }

    /// Bars on a terminal, and nothing elsewhere: for commands that have a line of their own for each job.
    pub(super) fn terminal_only() -> Show {
        match Show::new(false) {
            show if show.form == Form::Bars => show,
            _ => Show::silent(),
        }
    }

    /// Shows nothing.
    pub(super) fn silent() -> Show {
        Show::of(Form::Silent)
    }

    fn of(form: Form) -> Show {
        Show {
            form,
            bar: None,
            stage: String::new(),
            last_line: String::new(),
            last_loaded: String::new(),
        }
    }

    /// Shows one event.
    pub(super) fn event(&mut self, event: &v1::Event) -> Result<(), CliError> {
        let Some(kind) = &event.event else { return Ok(()) };
        match self.form {
            Form::Json => screen::message(event),
            Form::Bars => {
                self.draw(kind);
                Ok(())
            }
            Form::Lines => {
                self.line(kind);
                Ok(())
            }
            Form::Silent => Ok(()),
        }
    }

    /// Prints the ends of the request's texts that the model does not read.
    pub(super) fn left_out(&self, accepted: &v1::Accepted) {
        if self.form != Form::Json {
            accepted
                .left_out
                .iter()
                .for_each(|left_out| screen::note(&left_out.message));
        }
    }

    /// Removes the last bar from the screen.
    pub(super) fn end(&mut self) {
        if let Some(shown) = self.bar.take() {
            shown.bar.finish_and_clear();
        }
    }

    fn draw(&mut self, kind: &Kind) {
        if let Kind::Stage(stage) = kind {
            self.stage.clone_from(&stage.name);
        }
        match kind {
            Kind::Loading(loading) => {
                let name = loading
                    .component
                    .as_ref()
                    .map(|c| c.name.as_str())
                    .unwrap_or("a component");
                let bar = self.bar(&format!("loading {name}"), loading.bytes_total, BYTES);
                bar.set_position(loading.bytes_done);
            }
            Kind::Step(step) if step.parts > 0 => {
                let steps = Steps::of(step);
                let title = match step.item {
                    0 => "film".to_owned(),
                    more => format!("film {}", u64::from(more) + 1),
                };
                let bar = self.bar(&title, steps.of, SECTIONS);
                bar.set_message(words(kind).unwrap_or_default());
                bar.set_position(steps.done);
            }
            Kind::Step(step) => {
                let title = numbered(&self.stage, step.item);
                let bar = self.bar(&title, step.of.into(), STEPS);
                bar.set_position(step.n.into());
            }
            // Between the sections of a film its bar stays, so that it goes on counting the time left.
            other if self.is_within_film() && !matches!(other, Kind::Done(_)) => {
                if let (Some(line), Some(shown)) = (words(other), &self.bar) {
                    shown.bar.set_message(line);
                }
            }
            Kind::Stage(stage) if !stage.cached => {
                let title = numbered(&stage.name, stage.item);
                self.bar(&title, 0, SPINNER).tick();
            }
            Kind::Done(_) => self.end(),
            other => {
                if let Some(line) = words(other) {
                    self.bar(&line, 0, SPINNER).tick();
                }
            }
        }
    }

    /// Whether the bar belongs to a film with steps left.
    fn is_within_film(&self) -> bool {
        self.bar.as_ref().is_some_and(|shown| {
            shown.template == SECTIONS && Some(shown.bar.position()) < shown.bar.length()
        })
    }

    /// The bar of this title and form; another is finished.
    fn bar(&mut self, title: &str, length: u64, template: &'static str) -> &ProgressBar {
        if !matches!(&self.bar, Some(shown) if shown.title == title && shown.template == template) {
            self.end();
        }
        let shown = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(length);
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            }
            bar.set_message(wording::one_line(title).into_owned());
            bar.enable_steady_tick(std::time::Duration::from_millis(100));
            Shown {
                title: title.to_owned(),
                template,
                bar,
            }
        });
        &shown.bar
    }

    fn line(&mut self, kind: &Kind) {
        if let Kind::Loading(loading) = kind {
            // One line when a component begins; the bytes between would flood a log.
            let name = loading
                .component
                .as_ref()
                .map(|c| c.name.clone())
                .unwrap_or_default();
            if name == self.last_loaded {
                return;
            }
            self.last_loaded = name;
        }
        if let Kind::Step(step) = kind
            && !is_printed(Steps::of(step))
        {
            return;
        }
        if let Some(line) = words(kind)
            && line != self.last_line
        {
            screen::note(&line);
            self.last_line = line;
        }
    }
}

/// A stage of one of several results: `denoise, number 2`; that of the first has no number.
fn numbered(stage: &str, item: u32) -> String {
    match item {
        0 => stage.to_owned(),
        more => format!("{stage}, number {}", u64::from(more) + 1),
    }
}

/// Whether a step is printed: the first, the last, and about [`LINES_OF_STEPS`] in all.
fn is_printed(steps: Steps) -> bool {
    let tenth = |done: u64| done.saturating_mul(LINES_OF_STEPS) / steps.of.max(1);
    steps.done <= 1 || tenth(steps.done) != tenth(steps.done - 1)
}

const BYTES: &str = "{msg:28} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left";
const STEPS: &str = "{msg:28} {bar:30} step {pos}/{len}, {elapsed}, {eta} left";
/// The message has the section and its step; the bar counts the steps of all sections.
const SECTIONS: &str = "{msg:36} {bar:30} {percent}%, {elapsed}, {eta} left";
const SPINNER: &str = "{msg:28} {spinner} {elapsed}";

/// The line of an event, if it has one. Line breaks in names are escaped.
fn words(kind: &Kind) -> Option<String> {
    let words = match kind {
        Kind::Queued(queued) if queued.position == 0 => "queued, next".to_owned(),
        Kind::Queued(queued) => format!("queued, {} ahead", queued.position),
        Kind::Waiting(waiting) => {
            let who: Vec<String> = waiting
                .holders
                .iter()
                .map(|h| format!("{} holds {}", h.name, Bytes(h.bytes)))
                .collect();
            format!(
                "waiting for memory: {} needed, {} free, {:.1} s of patience left{}{}",
                Bytes(waiting.needed_bytes),
                Bytes(waiting.free_bytes),
                waiting.patience_left_ms as f64 / 1000.0,
                if who.is_empty() { "" } else { "; " },
                who.join(", ")
            )
        }
        Kind::Evicting(evicting) => {
            let component = evicting.component.clone().unwrap_or_default();
            format!("evicting {} ({})", component.name, Bytes(component.bytes))
        }
        Kind::Loading(loading) => {
            let component = loading.component.clone().unwrap_or_default();
            format!("loading {} ({})", component.name, Bytes(loading.bytes_total))
        }
        Kind::Retrying(retrying) if retrying.reason == "RESTORING" => retrying.message.clone(),
        Kind::Retrying(retrying) => format!("retrying {}: {}", retrying.stage, retrying.message),
        Kind::Stage(stage) => format!(
            "{} (stage {} of {}{}){}{}",
            stage.name,
            stage.index,
            stage.of,
            match stage.parts {
                0 => String::new(),
                parts => format!(", section {} of {parts}", stage.part),
            },
            if stage.cached { ", cached" } else { "" },
            match stage.chunking.as_str() {
                "" | "whole" => String::new(),
                chunking => format!(", {chunking}"),
            }
        ),
        Kind::Step(step) if step.parts > 0 => format!(
            "section {} of {}, step {} of {}",
            step.part, step.parts, step.n, step.of
        ),
        Kind::Step(step) => format!("step {} of {}", step.n, step.of),
        Kind::Latent(kept) => format!("latent kept: {}", kept.latent.clone().unwrap_or_default().id),
        Kind::Accepted(_) | Kind::Preview(_) | Kind::Artifact(_) | Kind::Done(_) => return None,
    };
    Some(wording::one_line(&words).into_owned())
}

impl Drop for Show {
    fn drop(&mut self) {
        self.end(); // a command that is interrupted leaves no bar
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_few_steps_and_about_ten_of_many_are_printed() {
        let told = |of: u64| (1..=of).filter(|&done| is_printed(Steps { done, of })).count();
        assert_eq!((told(1), told(8), told(10)), (1, 8, 10));
        assert_eq!(told(200), 11);
        assert!(is_printed(Steps { done: 200, of: 200 }));
    }

    /// A step of a film of three sections.
    fn step(part: u32, n: u32) -> Kind {
        Kind::Step(v1::Step {
            n,
            of: 25,
            part,
            parts: 3,
            ..Default::default()
        })
    }

    #[test]
    fn the_progress_bar_of_a_film_covers_all_sections() {
        let mut show = Show::silent();
        show.form = Form::Bars;
        let seen = |show: &Show| {
            let bar = &show.bar.as_ref().unwrap().bar;
            (bar.position(), bar.length().unwrap(), bar.message())
        };
        show.draw(&step(1, 25));
        assert_eq!(seen(&show), (25, 75, "section 1 of 3, step 25 of 25".to_owned()));
        show.draw(&Kind::Stage(v1::StageStarted {
            name: "decode".to_owned(),
            index: 4,
            of: 8,
            part: 1,
            parts: 3,
            ..Default::default()
        }));
        let decoding = "decode (stage 4 of 8, section 1 of 3)".to_owned();
        assert_eq!(seen(&show), (25, 75, decoding));
        show.draw(&step(2, 10));
        assert_eq!(seen(&show), (35, 75, "section 2 of 3, step 10 of 25".to_owned()));
        show.draw(&step(3, 25));
        show.draw(&Kind::Stage(v1::StageStarted::default()));
        assert_eq!(show.bar.as_ref().unwrap().template, SPINNER, "no step is left");
        show.end();
    }

    #[test]
    fn steps_replace_the_bar_of_their_stage() {
        let mut show = Show::silent();
        show.form = Form::Bars;
        show.draw(&Kind::Stage(v1::StageStarted {
            name: "sample".to_owned(),
            item: 1,
            ..Default::default()
        }));
        show.draw(&Kind::Step(v1::Step {
            n: 3,
            of: 100,
            item: 1,
            ..Default::default()
        }));
        let shown = show.bar.as_ref().unwrap();
        assert_eq!(shown.title, "sample, number 2");
        assert_eq!(
            (shown.template, shown.bar.length(), shown.bar.position()),
            (STEPS, Some(100), 3)
        );
        show.end();
    }
}
