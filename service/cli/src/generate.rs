//! `moored generate` and `moored plan`.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use api::v1;
use api::v1::event::Event as Kind;
use config::ClientSettings;
use futures::StreamExt as _;
use hub::catalogue;
use residency::Bytes;
use serde_json::json;

use crate::arguments::{Generate, MediumChoice, OutputArguments, Plan, Settings};
use crate::available::Card;
use crate::connection::{Connection, when_of};
use crate::files::{Target, Writing};
use crate::pull::WhenMissing;
use crate::request::{Asked, Wanted, medium_of, prompts_of, recipe_of, request_of};
use crate::results::{Bounds, Results};
use crate::show::Show;
use crate::track_uploads::{RequestTracks, Uploads};
use crate::{CliError, connection, interrupt, screen};

/// Generates a film, and writes it.
pub(super) async fn film(client: &ClientSettings, mut options: Generate, json: bool) -> Result<(), CliError> {
    match options.settings.medium {
        None | Some(MediumChoice::Video) => options.settings.medium = Some(MediumChoice::Video),
        Some(_) => {
            return Err(CliError::Usage(
                "`moored film` makes films: leave --medium out, or use `moored generate`".to_owned(),
            ));
        }
    }
    run(client, options, json).await
}

/// Generates, and writes the results.
pub(super) async fn run(client: &ClientSettings, mut options: Generate, json: bool) -> Result<(), CliError> {
    options.settings.formats.settle(client).await?;
    let order = Order::of(
        options.model.as_deref(),
        options.prompt.as_deref(),
        options.prompts.file.as_deref(),
        &options.settings,
        &options.output,
        client,
    )?;
    let connection = Connection::open(client).await?;
    order.carry_out(&connection, options.pull, json).await
}

/// The requests of one command, and the destination of their results.
#[derive(Clone)]
pub(super) struct Order {
    requests: Vec<Asked>,
    tracks: RequestTracks,
    target: Target,
    count: u32,
    /// For how long to ask again where the service refuses for now.
    retry: Duration,
}

impl Order {
    /// Made from the command line, without a service.
    pub(super) fn of(
        model: Option<&str>,
        prompt: Option<&str>,
        prompts: Option<&std::path::Path>,
        settings: &Settings,
        output: &OutputArguments,
        client: &ClientSettings,
    ) -> Result<Order, CliError> {
        let recipe = settings.from.as_deref().map(recipe_of).transpose()?;
        let medium = medium_of(settings, output.out.as_deref(), recipe.as_ref());
        let target = Target::of(output.out.as_deref(), medium, output.force)?;
        if target.is_stdout() && std::io::stdout().is_terminal() {
            return Err(CliError::Usage(
                "a result is not written to a terminal: redirect it, or use -o FILE".to_owned(),
            ));
        }
        let prompts = prompts_of(prompt, prompts, recipe.as_ref())?;
        let wanted = Wanted {
            medium,
            film: target.film_format(),
            track: target.track_format(),
            model,
            recipe,
            client: &client.name,
        };
        // Pictures and lyrics are read once, and shared: the requests differ in their prompts alone.
        let request = request_of(&wanted, String::new(), settings, output.no_metadata)?;
        let requests = prompts
            .into_iter()
            .map(|prompt| request.clone().with_prompt(prompt));
        let mut order = Order {
            count: settings.sampling.count,
            retry: settings.job.retry.map_or(Duration::ZERO, Into::into),
            tracks: match medium {
                MediumChoice::Audio => RequestTracks::of(settings)?,
                MediumChoice::Image | MediumChoice::Video => RequestTracks::default(),
            },
            requests: requests.collect(),
            target,
        };
        order.target.check(order.results())?;
        Ok(order)
    }

    /// Number of pictures, films or tracks.
    fn results(&self) -> u32 {
        u32::try_from(self.requests.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(self.count)
    }

    /// The first request, which stands for all.
    pub(super) fn first(&self) -> Option<&Asked> {
        self.requests.first()
    }

    /// Sets the preset of all requests.
    pub(super) fn set_formats(&mut self, preset: &str) {
        self.models().for_each(|model| {
            model.quantization = Some(v1::Quantization {
                preset: preset.to_owned(),
                ..Default::default()
            });
        });
    }

    fn models(&mut self) -> impl Iterator<Item = &mut v1::ModelRef> {
        self.requests.iter_mut().filter_map(Asked::model_mut)
    }

    /// Sends the requests one after the other, and writes the results.
    pub(super) async fn carry_out(
        &self,
        connection: &Connection,
        pull: bool,
        json: bool,
    ) -> Result<(), CliError> {
        let when_missing = WhenMissing {
            pull,
            json: json && !self.target.is_stdout(),
        };
        let connection = &connection.about(self.requests.first().and_then(Asked::model));
        let mut uploads = Uploads::default();
        let outcome = self.send_all(connection, when_missing, &mut uploads, json).await;
        uploads.release(connection).await;
        outcome
    }

    async fn send_all(
        &self,
        connection: &Connection,
        when_missing: WhenMissing,
        uploads: &mut Uploads,
        json: bool,
    ) -> Result<(), CliError> {
        for (index, request) in (0_u32..).zip(&self.requests) {
            let mut show = if json && self.target.is_stdout() {
                Show::silent()
            } else {
                Show::new(json)
            };
            if self.requests.len() > 1 && !json {
                screen::note(&format!(
                    "{} of {}: {}",
                    index + 1,
                    self.requests.len(),
                    request.prompt()
                ));
            }
            let mut attempt = async || {
                let mut request = request.clone();
                interrupt::or(self.tracks.name_in(&mut request, uploads, connection)).await?;
                generate(connection, request, &mut show).await
            };
            let began = Instant::now();
            let generated = loop {
                let generated = when_missing
                    .retry(connection, request.model(), &mut attempt)
                    .await;
                let wait = match &generated {
                    Err(CliError::Refused(refused)) => refused.retry_after(),
                    _ => None,
                };
                let Some(wait) = wait.filter(|wait| began.elapsed() + *wait <= self.retry) else {
                    break generated?;
                };
                screen::note(&format!(
                    "refused for now: asking again in {}",
                    humantime::format_duration(wait)
                ));
                interrupt::or(async {
                    tokio::time::sleep(wait).await;
                    Ok(())
                })
                .await?;
            };
            if let Some(job) = &generated.detached {
                detached(job, json)?;
                continue;
            }
            generated.write(&self.target, index * self.count, self.results(), json)?;
        }
        Ok(())
    }
}

/// Says how to get what a detached job makes.
fn detached(job: &str, json: bool) -> Result<(), CliError> {
    match json {
        true => screen::json(&json!({"event": "detached", "job": job})),
        false => {
            screen::note(&format!(
                "it goes on without this command: `moored fetch {job}` waits for its results, `moored jobs --all` lists it"
            ));
            screen::text(job)
        }
    }
}

impl Generated {
    /// Writes the results, of which the first has the number `first` among `of`.
    ///
    /// # Errors
    /// When there are none, or one cannot be written.
    pub(super) fn write(&self, target: &Target, first: u32, of: u32, json: bool) -> Result<(), CliError> {
        let done = &self.done;
        if self.results.iter().next().is_none() {
            return Err(CliError::Failed(
                "the service says that it is done, and sent no result".to_owned(),
            ));
        }
        for (item, track, result) in self.results.iter() {
            let file = target.encode(result)?;
            let path = target.write(
                &Writing {
                    item: first + item,
                    of,
                    track,
                    ending: result.own_ending(),
                    model: &self.model,
                    seed: done.seed.wrapping_add(item.into()),
                },
                &file,
            )?;
            if target.is_stdout() {
                continue; // the result is all of it
            }
            if json {
                screen::json(&json!({"event": "written", "item": item, "path": path.display().to_string()}))?;
            } else {
                screen::text(&path.display().to_string())?;
            }
        }
        if !json {
            screen::note(&summary(done));
            approximations(done).for_each(|told| screen::note(&told));
            if let Some(attention) = attention(&done.stages) {
                screen::detail(&format!("attention: {attention}"));
            }
        }
        Ok(())
    }
}

/// Prints a plan. Fails, with codes of their own, where it can never run or not now.
pub(super) async fn plan(
    client: &ClientSettings,
    headroom: Bytes,
    mut options: Plan,
    json: bool,
) -> Result<(), CliError> {
    options.settings.formats.settle(client).await?;
    let settings = &options.settings;
    let recipe = settings.from.as_deref().map(recipe_of).transpose()?;
    let mut prompts = prompts_of(options.prompt.as_deref(), None, recipe.as_ref())?;
    let medium = medium_of(settings, None, recipe.as_ref());
    let wanted = Wanted {
        medium,
        film: v1::FilmFormat::RawFrames,
        track: v1::AudioFormat::Wav,
        model: options.model.as_deref(),
        recipe,
        client: &client.name,
    };
    let asked = request_of(&wanted, prompts.swap_remove(0), settings, false)?;
    let model = asked.model().cloned();
    let request = v1::PlanRequest {
        request: Some(asked.into()),
        card: settings.job.card.clone().unwrap_or_default(),
    };
    let connection = Connection::open(client).await?.about(model.as_ref());
    let plan = connection.residency().plan(request).await?.into_inner();
    if json {
        screen::message(&plan)?;
    } else {
        let instead = match plan.runs_now {
            true => None,
            false => Card::of_service(&connection, headroom).await?.and_then(|card| {
                let planned = plan.model.as_ref().map_or("", |planned| planned.id.as_str());
                catalogue::fitting_instead(medium.into(), &card.room, planned)
            }),
        };
        show_plan(&plan, instead.as_deref())?;
    }
    let verdict = |verdict: &str| plan.stages.iter().find(|stage| stage.verdict == verdict);
    if let Some(stage) = verdict("never") {
        return Err(CliError::DoesNotFit(format!(
            "{} can never run on {}",
            stage.name, plan.card
        )));
    }
    if let Some(stage) = verdict("wait").filter(|_| !plan.runs_now) {
        return Err(CliError::NotNow(format!(
            "{} does not run on {} now; `moored status` shows who holds memory",
            stage.name, plan.card
        )));
    }
    Ok(())
}

/// Prints a plan. Where no form of the model fits, it also prints `instead`, a model that does.
fn show_plan(plan: &v1::PlanResponse, instead: Option<&str>) -> Result<(), CliError> {
    let rows = plan.stages.iter().map(|stage| {
        let scratch = if stage.scratch_learned {
            "measured"
        } else {
            "predicted"
        };
        vec![
            stage.name.clone(),
            Bytes(stage.component_bytes).to_string(),
            format!("{} ({scratch})", Bytes(stage.scratch_bytes)),
            stage.chunking.clone(),
            stage.verdict.clone(),
            stage.moves.join(", "),
        ]
    });
    screen::table(
        &["stage", "components", "scratch", "chunking", "verdict", "moves"],
        rows.collect(),
    )?;
    for stage in &plan.stages {
        for part in &stage.streamed {
            screen::text(&format!(
                "{}: {} {}",
                stage.name,
                part.name,
                wording::one_line(&part.words)
            ))?;
        }
    }
    let mut told: Vec<String> = Vec::new();
    for shortfall in plan.stages.iter().filter_map(|stage| stage.shortfall.as_ref()) {
        for fallback in &shortfall.fallbacks {
            let line = format!(
                "{} would fit {} ({})",
                fallback.label,
                when_of(fallback),
                Bytes(fallback.peak_bytes)
            );
            if !told.contains(&line) {
                screen::text(&line)?;
                told.push(line);
            }
        }
    }
    if plan.runs_now {
        return screen::text(&format!(
            "on {}: runs now; {:.2} s of moves first",
            plan.card, plan.predicted_move_seconds
        ));
    }
    if told.is_empty() {
        screen::text(&match instead {
            Some(instead) => format!("nothing smaller of it would fit; {instead}"),
            None => "nothing smaller is known that would fit".to_owned(),
        })?;
    }
    let never = plan.stages.iter().any(|stage| stage.verdict == "never");
    let when = if never {
        "can never run"
    } else {
        "does not run now"
    };
    screen::text(&format!("on {}: {when}", plan.card))
}

/// The results of a generate call.
pub(super) struct Generated {
    pub(super) results: Results,
    pub(super) done: v1::Done,
    /// Id of the model.
    pub(super) model: String,
    /// The job, where it goes on without the command.
    pub(super) detached: Option<String>,
}

/// Sends a request and follows it to its end. A signal drops the stream, which cancels the job.
pub(super) async fn generate(
    connection: &Connection,
    request: Asked,
    show: &mut Show,
) -> Result<Generated, CliError> {
    let generated = interrupt::or(follow(connection, request, show)).await;
    show.end();
    generated
}

async fn follow(connection: &Connection, request: Asked, show: &mut Show) -> Result<Generated, CliError> {
    let mut generation = connection.generation();
    let (bounds, detach) = (Bounds::of(&request), request.is_detached());
    let events = match request {
        Asked::Generate(image) => generation.generate_image(image).await,
        Asked::Video(video) => generation.generate_video(video).await,
        Asked::Audio(audio) => generation.generate_audio(audio).await,
    };
    read(events?.into_inner(), bounds, detach, show).await
}

/// Reads the events of a job to its end, or only until it is accepted.
///
/// # Errors
/// When the job fails, or the connection is cut.
pub(super) async fn read(
    mut events: tonic::Streaming<v1::Event>,
    bounds: Bounds,
    until_accepted: bool,
    show: &mut Show,
) -> Result<Generated, CliError> {
    let mut generated = Generated {
        results: Results::within(bounds),
        done: v1::Done::default(),
        model: String::new(),
        detached: None,
    };
    while let Some(event) = events.next().await {
        let event = event?;
        show.event(&event)?;
        match event.event {
            Some(Kind::Artifact(chunk)) => {
                generated.results.add(chunk).map_err(CliError::Failed)?;
            }
            Some(Kind::Accepted(accepted)) => {
                show.left_out(&accepted);
                generated.model = accepted.model.unwrap_or_default().id;
                if until_accepted {
                    generated.detached = Some(event.job_id);
                    return Ok(generated);
                }
            }
            Some(Kind::Done(done)) => {
                generated.done = done;
                return Ok(generated);
            }
            _ => {}
        }
    }
    Err(connection::cut())
}

/// The times of a finished job in a line.
pub(super) fn summary(done: &v1::Done) -> String {
    let mut parts = Vec::new();
    for stage in &done.stages {
        let mut part = if stage.cached {
            format!("{} cached", stage.name)
        } else {
            format!("{} {}", stage.name, seconds(stage.run_ms))
        };
        if stage.move_ms > 0 {
            part += &format!(" (+{} loading)", seconds(stage.move_ms));
        }
        if stage.wait_ms > 0 {
            part += &format!(" (+{} waiting)", seconds(stage.wait_ms));
        }
        parts.push(part);
    }
    format!(
        "seed {}, {}: {}",
        done.seed,
        seconds(done.total_ms),
        parts.join(", ")
    )
}

/// A line for each way in which a result is not computed as the reference does.
fn approximations(done: &v1::Done) -> impl Iterator<Item = String> {
    let said = done.approximations.iter();
    said.map(|approximation| format!("approximate: {approximation}"))
}

/// The implementation of attention, by stage where the stages differ.
fn attention(stages: &[v1::StageReport]) -> Option<String> {
    let mut paths: Vec<(&str, Vec<&str>)> = Vec::new();
    for stage in stages.iter().filter(|stage| !stage.attention.is_empty()) {
        let known = paths.iter().position(|(path, _)| *path == stage.attention);
        let at = known.unwrap_or_else(|| {
            paths.push((&stage.attention, Vec::new()));
            paths.len() - 1
        });
        if !paths[at].1.contains(&stage.name.as_str()) {
            paths[at].1.push(&stage.name);
        }
    }
    match &paths[..] {
        [] => None,
        [(path, _)] => Some((*path).to_owned()),
        several => {
            let named = several
                .iter()
                .map(|(path, stages)| format!("{} by {path}", stages.join(", ")));
            Some(named.collect::<Vec<_>>().join("; "))
        }
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.2} s", milliseconds as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::arguments::{Arguments, Command};

    #[test]
    fn the_files_of_a_request_are_read_once_for_all_prompts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("prompts.txt"), "one\n\ntwo\n").unwrap();
        std::fs::write(path("start.png"), b"a picture").unwrap();
        let (prompts, start) = (path("prompts.txt"), path("start.png"));
        let written = ["moored", "generate", "--prompts", &prompts, "--init", &start];
        let order = order_of(&written).unwrap();
        let [Asked::Generate(one), Asked::Generate(two)] = &order.requests[..] else {
            panic!("{:?}", order.requests);
        };
        assert_eq!((one.prompt.as_str(), two.prompt.as_str()), ("one", "two"));
        let start_of = |request: &v1::GenerateImageRequest| request.init_image.clone().unwrap();
        assert_eq!(start_of(one), b"a picture"[..]);
        assert_eq!(
            start_of(one).as_ptr(),
            start_of(two).as_ptr(),
            "shared, and read once"
        );
    }

    #[test]
    fn a_film_may_be_sampled_on_several_cards_and_nothing_else() {
        let asked = |medium| {
            let written = ["moored", "generate", "a wave", "--cards", "2", "--medium", medium];
            order_of(&written)
        };
        let order = asked("video").unwrap();
        let [Asked::Video(film)] = &order.requests[..] else {
            panic!("{:?}", order.requests);
        };
        assert_eq!(film.cards, Some(2));
        for (medium, what) in [("image", "a picture"), ("audio", "a track")] {
            let refused = asked(medium).err().unwrap().to_string();
            let begin = format!("--cards does not apply to {what}");
            assert!(refused.starts_with(&begin), "{refused}");
        }
    }

    /// What `moored generate` asks for by these words.
    fn order_of(written: &[&str]) -> Result<Order, CliError> {
        let Command::Generate(options) = Arguments::parse_from(written).command else {
            panic!("another command");
        };
        let client = ClientSettings {
            endpoint: String::new(),
            token: None,
            token_file: None,
            ca_file: None,
            fingerprint: None,
            certificate: None,
            credentials: None,
            insecure_token: false,
            at_box: None,
            name: "me".to_owned(),
        };
        Order::of(
            None,
            options.prompt.as_deref(),
            options.prompts.file.as_deref(),
            &options.settings,
            &options.output,
            &client,
        )
    }

    #[test]
    fn attention_is_listed_by_stage_where_stages_differ() {
        let stage = |name: &str, attention: &str| v1::StageReport {
            name: name.to_owned(),
            attention: attention.to_owned(),
            ..Default::default()
        };
        let mut stages = vec![stage("load", ""), stage("denoise", "cudnn 9.19.0")];
        assert_eq!(attention(&stages[..1]), None);
        assert_eq!(attention(&stages).as_deref(), Some("cudnn 9.19.0"));
        stages.extend([stage("denoise", "cudnn 9.19.0"), stage("decode", "own kernels")]);
        assert_eq!(
            attention(&stages).as_deref(),
            Some("denoise by cudnn 9.19.0; decode by own kernels")
        );
    }
}
