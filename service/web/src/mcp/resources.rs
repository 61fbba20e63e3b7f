//! Results as resources: `moored://jobs/JOB/NUMBER`. They are those of detached jobs, which the service keeps.

use access::Role;
use bytes::Bytes;
use calls::{Caller, Service};
use engine::job::Call;
use engine::{Error, JobState};
use rmcp::ErrorData;
use rmcp::model::{ReadResourceResult, Resource, ResourceContents, ResourceTemplate};
use transport::check_role;

use super::Asker;
use crate::results::{File, base64, gathered};

/// Beginning of the addresses of results.
const SCHEME: &str = "moored://jobs/";

/// The address of a result.
pub(super) fn address(job: &str, number: usize) -> String {
    format!("{SCHEME}{job}/{number}")
}

/// Every result, by its address.
pub(super) fn template() -> ResourceTemplate {
    ResourceTemplate::new(format!("{SCHEME}{{job}}/{{number}}"), "result")
        .with_description("A picture, film or track that a job of this service has made, from 0")
}

/// The first result of each of the caller's jobs that is done, the latest first.
pub(super) async fn list(service: &Service, caller: &Caller) -> Vec<Resource> {
    let mut jobs = service.jobs.list_within(true, caller).await;
    jobs.retain(|job| job.end.is_some() && job.info.state == JobState::Done && kind(job.info.call).is_some());
    jobs.sort_by_key(|job| job.end.map(|end| end.ago));
    let resources = jobs.iter().map(|job| {
        let id = job.info.id.to_string();
        let what = kind(job.info.call).unwrap_or_default();
        Resource::new(address(&id, 0), format!("{what} of {id}"))
            .with_description(format!("A {what} by {}", job.info.model_key))
    });
    resources.collect()
}

fn kind(call: Call) -> Option<&'static str> {
    match call {
        Call::GenerateImage | Call::DecodeLatent => Some("picture"),
        Call::GenerateVideo => Some("film"),
        Call::GenerateAudio => Some("track"),
        Call::StreamAudio | Call::EncodeImage | Call::Load | Call::Plan => None,
    }
}

/// A result, whole.
pub(super) async fn read(
    service: &Service,
    address: &str,
    asker: &Asker,
) -> Result<ReadResourceResult, ErrorData> {
    let file = file_at(service, address, asker).await;
    let file = file.map_err(|problem| ErrorData::resource_not_found(problem, None))?;
    let blob = ResourceContents::blob(base64(&file.data), address).with_mime_type(file.media_type);
    Ok(ReadResourceResult::new(vec![blob]))
}

/// The file at an address.
///
/// # Errors
/// In words.
pub(super) async fn file_at(service: &Service, address: &str, asker: &Asker) -> Result<File, String> {
    if let Some(holder) = asker
        .admitted
        .as_ref()
        .and_then(|admitted| admitted.holder.as_ref())
    {
        check_role("a result", Role::Generate, holder).map_err(|refusal| refusal.to_string())?;
    }
    let wrong = || format!("{address:?} is no address of a result: write {SCHEME}JOB/NUMBER");
    let (job, number) = address
        .strip_prefix(SCHEME)
        .and_then(|rest| rest.split_once('/'))
        .ok_or_else(wrong)?;
    let number: usize = number.parse().map_err(|_| wrong())?;
    let words = |error: Error| calls::words_of(&error);
    let started = service.jobs.fetch(job, &asker.caller).map_err(words)?;
    let (files, _) = gathered(started.events).await.map_err(words)?;
    let file = files.files().nth(number).cloned();
    file.ok_or_else(|| format!("the job {job} has no result {number}"))
}

/// A picture that a tool is given: the address of a result, a `data:` address, or base64.
///
/// # Errors
/// In words.
pub(super) async fn picture(
    service: &Service,
    field: &str,
    given: &str,
    asker: &Asker,
) -> Result<Bytes, String> {
    if given.starts_with(SCHEME) {
        let file = file_at(service, given, asker).await?;
        return Ok(file.data.freeze());
    }
    crate::forms::decoded(field, given).map_err(|failure| failure.words.message)
}
