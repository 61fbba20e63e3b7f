//! `moored fetch`: what a detached job has made, once it has ended.

use api::v1;
use api::v1::artifact::Format;
use config::ClientSettings;

use crate::arguments::{FetchOutput, MediumChoice};
use crate::connection::Connection;
use crate::files::Target;
use crate::generate::{Generated, read};
use crate::results::Bounds;
use crate::show::Show;
use crate::{CliError, interrupt};

/// Waits for the end of a job, and writes its results. Leaving leaves the job alone.
pub(super) async fn run(
    client: &ClientSettings,
    job: String,
    output: &FetchOutput,
    json: bool,
) -> Result<(), CliError> {
    // Before anything is waited for: the ending is checked against the medium once that is known.
    let is_stdout = Target::of(
        output.out.as_deref(),
        medium_of_name(output.out.as_deref()),
        output.force,
    )?
    .is_stdout();
    let connection = Connection::open(client).await?;
    let mut show = match json && is_stdout {
        true => Show::silent(),
        false => Show::new(json),
    };
    let fetched = interrupt::or(follow(&connection, job, &mut show)).await;
    show.end();
    let fetched = fetched?;
    let mut target = Target::of(output.out.as_deref(), medium_of(&fetched), output.force)?;
    let items = fetched.results.iter().map(|(item, ..)| item + 1).max();
    let items = items.unwrap_or_default();
    target.check(items)?;
    fetched.write(&target, 0, items, json)
}

async fn follow(connection: &Connection, job_id: String, show: &mut Show) -> Result<Generated, CliError> {
    let events = connection.jobs().fetch(v1::FetchJobRequest { job_id }).await?;
    read(events.into_inner(), Bounds::UNKNOWN, false, show).await
}

/// The medium of what has arrived.
fn medium_of(fetched: &Generated) -> MediumChoice {
    let mut formats = fetched
        .results
        .iter()
        .filter_map(|(_, _, result)| result.format());
    match formats.find(|format| !matches!(format, Format::Audio(_))) {
        Some(Format::Image(_)) => MediumChoice::Image,
        Some(Format::Video(_)) => MediumChoice::Video,
        Some(Format::Audio(_)) | None if fetched.results.iter().next().is_some() => MediumChoice::Audio,
        _ => MediumChoice::Image,
    }
}

/// The medium whose files have this ending.
fn medium_of_name(out: Option<&str>) -> MediumChoice {
    let ending = out
        .and_then(|out| out.rsplit_once('.'))
        .map(|(_, ending)| ending.to_ascii_lowercase());
    match ending.as_deref() {
        Some("mp4") => MediumChoice::Video,
        Some("wav" | "flac") => MediumChoice::Audio,
        _ => MediumChoice::Image,
    }
}
