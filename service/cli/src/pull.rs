//! `moored pull`, and pulls of missing models by other commands.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use api::v1;
use api::v1::pull_event::Event;
use futures::StreamExt as _;
use hub::{Base, Hub, Progress, PullPlan, Reference, catalogue};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tokio::sync::watch;

use crate::Program;
use crate::arguments::Verbosity;
use crate::connection::{Connection, Refusal};
use crate::names::short_revision;
use crate::pull_messages::{progress_of, pulled_of};
use crate::{CliError, interrupt, screen};

/// Least time between two lines in a pipe, and between two JSON lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const JSON_INTERVAL: Duration = Duration::from_millis(200);
const BYTES: &str = "{msg:32!} {bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";

/// `moored pull`.
pub(super) async fn run(
    program: &dyn Program,
    hub: config::HubSettings,
    model: &str,
    dry_run: bool,
    json: bool,
) -> Result<(), CliError> {
    here(program, hub, &model.parse()?, dry_run, json).await
}

/// Pulls into the hub cache of this machine, without a service, and prints the plan first.
pub(super) async fn here(
    program: &dyn Program,
    settings: config::HubSettings,
    model: &Reference,
    dry_run: bool,
    json: bool,
) -> Result<(), CliError> {
    let cache = settings.cache.clone();
    let prepared = Hub::new(settings, program.families()).prepare(model).await?;
    // JSON has the plan only with `--dry-run`: the event at the end of a pull has the same fields.
    if dry_run || !json {
        print_plan(model, &prepared.plan(), &cache, dry_run, json)?;
    }
    if dry_run {
        return Ok(());
    }
    let (sender, mut progress) = watch::channel(Progress::default());
    let mut show = ShowPull::new(json);
    let pull = async {
        let pull = prepared.pull(sender);
        tokio::pin!(pull);
        let mut ticks = tokio::time::interval(JSON_INTERVAL);
        loop {
            tokio::select! {
                ended = &mut pull => return Ok(ended?),
                Ok(()) = progress.changed() => show.progress(progress_of(progress.borrow_and_update().clone()))?,
                _ = ticks.tick() => show.tick()?,
            }
        }
    };
    let pulled = interrupt::or(pull).await;
    show.end();
    let pulled = pulled.map_err(|problem| match problem {
        CliError::Interrupted(_) => CliError::Interrupted(format!(
            "interrupted; what was downloaded stays, and `moored pull {model}` resumes there"
        )),
        other => other,
    })?;
    let path = pulled.path.clone();
    print_pulled(&pulled_of(pulled), Some(&path), json)
}

/// Prints the files that a pull would download.
fn print_plan(
    model: &Reference,
    plan: &PullPlan,
    cache: &Path,
    dry_run: bool,
    json: bool,
) -> Result<(), CliError> {
    if json {
        return screen::json(
            &json!({"event": "plan", "id": model.listed_id(), "revision": plan.revision,
            "bytes_total": plan.bytes_total, "bytes_missing": plan.bytes_missing, "files_total": plan.files_total,
            "cache": cache.display().to_string()}),
        );
    }
    let size = match plan.bytes_missing {
        0 => format!("{}, all of it here already", decimal(plan.bytes_total)),
        missing if missing == plan.bytes_total => format!("{} to download", decimal(missing)),
        missing => format!(
            "{} to download of {}",
            decimal(missing),
            decimal(plan.bytes_total)
        ),
    };
    let known = catalogue::find(&model.listed_id());
    let licence = known.map_or(String::new(), |known| format!("; licence: {}", known.licence));
    let line = format!(
        "{model}: {} files, {size}, into {}{licence}",
        plan.files_total,
        cache.display()
    );
    match dry_run {
        true => screen::text(&line)?,
        false => screen::note(&line),
    }
    match &plan.base {
        Base::Own => {}
        Base::Pipeline(base) => screen::note(&format!(
            "it is a transformer alone: its text encoders, autoencoder and tokenizers are those of {base}, counted above"
        )),
        Base::Unknown => screen::note(
            "it is a transformer alone, and its page names no pipeline that is run here: pull one of its family as well \
             (`moored models --available`), unless one is here",
        ),
    }
    Ok(())
}

/// Policy for a model that the service lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct WhenMissing {
    /// Whether to pull without asking.
    pub(super) pull: bool,
    pub(super) json: bool,
}

impl WhenMissing {
    /// Runs `attempt`; if the service does not have the model, has the service pull it, and runs `attempt` again.
    pub(super) async fn retry<T>(
        self,
        connection: &Connection,
        model: Option<&v1::ModelRef>,
        mut attempt: impl AsyncFnMut() -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let refused = match attempt().await {
            Err(CliError::Refused(refused)) if refused.is_of_missing_model() => refused,
            other => return other,
        };
        // A call may name several models: only `model` is pulled, or the service's default where that has no name.
        let named = model.map_or("", |model| &model.id);
        let missing = Some(&refused.model).filter(|missing| named.is_empty() || named == *missing);
        let Some(model) = missing.and_then(|missing| Reference::of_entry(missing)) else {
            return Err(CliError::Refused(refused));
        };
        if !self.confirm(connection, &model, &refused).await? {
            return Err(CliError::Refused(refused));
        }
        by_service(connection, &model, self.json).await?;
        attempt().await
    }

    /// Whether to pull: by option, or by the answer of the person at the terminal.
    async fn confirm(
        self,
        connection: &Connection,
        model: &Reference,
        refused: &Refusal,
    ) -> Result<bool, CliError> {
        if self.pull {
            return Ok(true);
        }
        if !screen::can_ask(self.json) {
            return Ok(false);
        }
        let plan = match connection.hub().plan_pull(request(model)).await {
            Ok(plan) => plan.into_inner(),
            Err(problem) => {
                screen::note(&format!("{}; {}", refused.message, Refusal::of(&problem).message));
                return Ok(false);
            }
        };
        let size = decimal(plan.bytes_missing);
        screen::confirm(&format!("{model} is not here: {size} to pull. Pull it?")).await
    }
}

/// Has the service pull a model. A signal leaves the pull, which ends it if nobody else waits for it.
pub(super) async fn by_service(
    connection: &Connection,
    model: &Reference,
    json: bool,
) -> Result<(), CliError> {
    let mut show = ShowPull::new(json);
    let pulled = interrupt::or(follow(connection, model, &mut show, json)).await;
    show.end();
    pulled
}

/// Shows the events of a pull by the service until it ends.
async fn follow(
    connection: &Connection,
    model: &Reference,
    show: &mut ShowPull,
    json: bool,
) -> Result<(), CliError> {
    let mut events = connection.hub().pull_model(request(model)).await?.into_inner();
    let mut ticks = tokio::time::interval(JSON_INTERVAL);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = ticks.tick() => {
                show.tick()?;
                continue;
            }
        };
        let Some(event) = event else { return Ok(()) };
        match event?.event {
            Some(Event::Progress(progress)) => show.progress(progress)?,
            Some(Event::Pulled(pulled)) => {
                show.end();
                print_pulled(&pulled, None, json)?;
            }
            None => {}
        }
    }
}

fn request(model: &Reference) -> v1::PullModelRequest {
    v1::PullModelRequest {
        id: model.listed_id(),
        revision: model.revision.clone(),
    }
}

/// Prints what has been pulled, and its path if that is on this machine.
fn print_pulled(pulled: &v1::PulledModel, path: Option<&Path>, json: bool) -> Result<(), CliError> {
    let path = path.map(|path| path.display().to_string());
    if json {
        let mut said = json!({"event": "pulled", "id": pulled.id, "revision": pulled.revision,
            "bytes_total": pulled.bytes_total, "bytes_fetched": pulled.bytes_fetched});
        if let Some(path) = path {
            said["path"] = path.into();
        }
        return screen::json(&said);
    }
    let short = short_revision(&pulled.revision);
    let (model, total) = (format!("{} at {short}", pulled.id), decimal(pulled.bytes_total));
    screen::note(&match pulled.bytes_fetched {
        0 => format!("{model} was here already, {total}"),
        fetched => format!(
            "{model} is here: {total}, of which {} were fetched",
            decimal(fetched)
        ),
    });
    path.map_or(Ok(()), |path| screen::text(&path))
}

/// A size in decimal units, as hubs show it.
pub(super) fn decimal(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().si().to_string()
}

/// The progress of a pull: a bar on a terminal, lines in a pipe, or JSON.
struct ShowPull {
    json: bool,
    bar: Option<ProgressBar>,
    latest: Option<v1::PullProgress>,
    printed_at: Option<Instant>,
}

impl ShowPull {
    fn new(json: bool) -> ShowPull {
        let in_terminal = !json && std::io::stderr().is_terminal() && screen::verbosity() > Verbosity::Quiet;
        ShowPull {
            json,
            bar: in_terminal.then(|| {
                let bar = ProgressBar::new(0);
                if let Ok(style) = ProgressStyle::with_template("{msg} {spinner}") {
                    bar.set_style(style);
                }
                bar.set_message("asking the hub");
                bar
            }),
            latest: None,
            printed_at: None,
        }
    }

    fn progress(&mut self, progress: v1::PullProgress) -> Result<(), CliError> {
        if progress.bytes_total == 0 {
            return Ok(());
        }
        if let Some(bar) = &self.bar {
            if bar.length() != Some(progress.bytes_total)
                && let Ok(style) = ProgressStyle::with_template(BYTES)
            {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
                bar.set_message("");
            }
            bar.set_length(progress.bytes_total);
            bar.set_position(progress.bytes_done);
            if !progress.file.is_empty() {
                bar.set_message(progress.file);
            }
            return Ok(());
        }
        self.latest = Some(progress);
        self.tick()
    }

    /// Prints the latest progress, if the interval has passed.
    fn tick(&mut self) -> Result<(), CliError> {
        if let Some(bar) = &self.bar {
            bar.tick(); // progress that arrived faster than the bar is drawn
        }
        let interval = if self.json { JSON_INTERVAL } else { LINE_INTERVAL };
        if self
            .printed_at
            .is_some_and(|printed_at| printed_at.elapsed() < interval)
        {
            return Ok(());
        }
        let Some(progress) = self.latest.take() else {
            return Ok(());
        };
        self.printed_at = Some(Instant::now());
        let (done, total) = (progress.bytes_done, progress.bytes_total);
        if self.json {
            return screen::json(
                &json!({"event": "pulling", "bytes_done": done, "bytes_total": total,
                "files_done": progress.files_done, "files_total": progress.files_total, "file": progress.file}),
            );
        }
        screen::note(&format!(
            "pulled {} of {}, {} of {} files",
            decimal(done),
            decimal(total),
            progress.files_done,
            progress.files_total
        ));
        Ok(())
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_decimal_units() {
        assert_eq!(decimal(23_800_000_000), "23.8 GB");
    }
}
