//! The result of a tool that makes something: a preview, the address of each file, and what a program reads.

use calls::{EventKind, Service, Started};
use engine::Error;
use engine::job::{JobEventKind, JobReport};
use futures::StreamExt as _;
use media::CancelToken;
use media::pictures::{decode, preview_jpeg};

use rmcp::RoleServer;
use rmcp::model::{CallToolResult, ContentBlock, ProgressNotificationParam, Resource};
use rmcp::service::RequestContext;
use serde_json::json;

use super::{Asker, resources};
use crate::errors::Failure;
use crate::results::{Gathered, base64};

/// Name of the agent in the list of jobs, where it is cancelled.
const AGENT: &str = "mcp";

/// A failure as a tool tells of it: the message says what to do next.
pub(super) fn failed(failure: Failure) -> CallToolResult {
    let mut result = CallToolResult::error(vec![ContentBlock::text(failure.words.message.clone())]);
    result.structured_content = Some(json!({"error": failure.words}));
    result
}

/// A failure in words.
pub(super) fn failed_with(problem: impl Into<String>) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(problem)])
}

/// What an agent is told of a job that goes on without it.
pub(super) fn begun(started: &Started) -> CallToolResult {
    let job = started.job.to_string();
    let words = format!("The job {job} has begun. get_result waits for it; cancel_job ends it.");
    let mut result = CallToolResult::success(vec![ContentBlock::text(words)]);
    result.structured_content = Some(json!({"job": job}));
    result
}

/// Waits for a job, tells its progress, and ends it where the agent cancels the request.
pub(super) async fn awaited(
    service: &Service,
    started: Started,
    asker: &Asker,
    context: &RequestContext<RoleServer>,
) -> CallToolResult {
    let job = started.job.to_string();
    let followed = tokio::select! {
        followed = follow(started, context) => followed,
        () = context.ct.cancelled() => {
            let ended = service.jobs.cancel(&job, AGENT.to_owned(), true, &asker.caller).await;
            return match ended {
                Ok(_) => failed_with(format!("The job {job} was cancelled.")),
                Err(error) => failed(error.into()),
            };
        }
    };
    match followed {
        Ok((files, preview, report)) => made(&job, &files, preview, &report).await,
        Err(error) => failed(error.into()),
    }
}

/// The files of a job, its last preview and its report, once it has ended.
async fn follow(
    started: Started,
    context: &RequestContext<RoleServer>,
) -> Result<(Gathered, Option<Vec<u8>>, JobReport), Error> {
    let token = context.meta.get_progress_token();
    let (mut files, mut preview, mut told) = (Gathered::default(), None, 0.0);
    let mut events = started.events;
    while let Some(event) = events.next().await {
        let progress = match event?.kind {
            EventKind::Chunk(chunk) => {
                files.add(chunk);
                continue;
            }
            EventKind::Preview { jpeg, .. } => {
                preview = Some(jpeg.to_vec());
                continue;
            }
            EventKind::Job(JobEventKind::Done(report)) => {
                return Ok((files, preview, JobReport::clone(&report)));
            }
            EventKind::Job(event) => words_of(&event),
        };
        let (Some(token), Some((words, of))) = (&token, progress) else {
            continue;
        };
        // It has to grow with each message, and waits have no measure.
        told += 1.0;
        let mut progress = ProgressNotificationParam::new(token.clone(), told).with_message(words);
        if let Some((done, all)) = of {
            told = f64::max(told, done);
            progress.progress = told;
            progress.total = Some(f64::max(all, told));
        }
        let _ = context.peer.notify_progress(progress).await; // an agent that has left cancels the request
    }
    Err(Error::ShuttingDown)
}

/// The words of an event that an agent is told, and how much of all is done.
fn words_of(event: &JobEventKind) -> Option<(String, Option<(f64, f64)>)> {
    Some(match event {
        JobEventKind::Queued { position, .. } => (format!("queued, {position} jobs ahead"), None),
        JobEventKind::Waiting { cause, holders, .. } => {
            let holders: Vec<&str> = holders.iter().map(|holder| holder.name.as_str()).collect();
            (
                format!("waits for memory ({cause}): {}", holders.join(", ")),
                None,
            )
        }
        JobEventKind::Loading { component, done, .. } => (
            format!("loads {}: {done} of {}", component.name, component.bytes),
            None,
        ),
        JobEventKind::Retrying { message, .. } => (message.clone(), None),
        JobEventKind::Stage { name, index, of, .. } => (format!("{name}, stage {index} of {of}"), None),
        JobEventKind::Step { n, of, .. } => {
            (format!("step {n} of {of}"), Some((f64::from(*n), f64::from(*of))))
        }
        JobEventKind::Accepted { .. }
        | JobEventKind::Evicting { .. }
        | JobEventKind::Preview { .. }
        | JobEventKind::Piece { .. }
        | JobEventKind::Latent { .. }
        | JobEventKind::Done(_)
        | JobEventKind::Failed(_) => return None,
    })
}

/// What was made, with a preview of the first picture or the last of a film.
async fn made(job: &str, files: &Gathered, preview: Option<Vec<u8>>, report: &JobReport) -> CallToolResult {
    let (mut content, mut listed) = (Vec::new(), Vec::new());
    for (number, file) in files.files().enumerate() {
        let address = resources::address(job, number);
        let bytes = file.data.len() as u64;
        if file.media_type.starts_with("image/") {
            let png = file.data.clone();
            let small = tokio::task::spawn_blocking(move || small(&png)).await;
            if let Ok(Some(jpeg)) = small {
                content.push(ContentBlock::image(base64(&jpeg), "image/jpeg"));
            }
        }
        let resource = Resource::new(&address, format!("result {number} of {job}"))
            .with_mime_type(&file.media_type)
            .with_size(bytes);
        content.push(ContentBlock::resource_link(resource));
        listed.push(json!({"uri": address, "media_type": file.media_type, "bytes": bytes}));
    }
    let is_film = files.files().any(|file| file.media_type.starts_with("video/"));
    if let Some(jpeg) = preview.filter(|_| is_film) {
        content.insert(0, ContentBlock::image(base64(&jpeg), "image/jpeg"));
    }
    let seconds = report.total.as_secs_f64();
    let mut words = format!("Made in {seconds:.1} s with the seed {}.", report.seed);
    for approximation in &report.approximations {
        words = format!("{words} An approximation: {approximation}.");
    }
    content.push(ContentBlock::text(words));
    let mut result = CallToolResult::success(content);
    result.structured_content =
        Some(json!({"job": job, "seed": report.seed, "seconds": seconds, "results": listed}));
    result
}

/// A picture as a small JPEG.
fn small(picture: &[u8]) -> Option<Vec<u8>> {
    let pixels = decode(picture, None, &CancelToken::default()).ok()?;
    preview_jpeg(pixels.width, pixels.height, pixels.rgb.into()).ok()
}
