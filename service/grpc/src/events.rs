//! The events of a job as a stream of the protocol.

use std::pin::Pin;

use api::v1;
use calls::Started;
use engine::Error;
use futures::{Stream, StreamExt as _};
use tonic::{Response, Status};

use crate::convert::{OfJob, event, kind_out, left_out_out, resolved_out};
use crate::status::status_of;

/// The events of a job, until its end or its error.
pub(crate) type EventStream = Pin<Box<dyn Stream<Item = Result<v1::Event, Status>> + Send>>;

/// The events of a job that was queued. Dropping the stream drops the job, which cancels it.
pub(crate) fn events_of(started: Result<Started, Error>) -> Result<Response<EventStream>, Status> {
    let Started {
        job,
        model,
        left_out,
        events,
    } = started.map_err(|error| status_of(&error))?;
    let model = resolved_out(&model);
    let left_out: Vec<v1::TextLeftOut> = left_out.iter().map(left_out_out).collect();
    let events = events.filter_map(move |happened| {
        let of = OfJob {
            model: &model,
            left_out: &left_out,
        };
        let sent = match happened {
            Ok(happened) => kind_out(happened.kind, &of).map(|kind| Ok(event(&job, happened.at_ms, kind))),
            Err(error) => Some(Err(status_of(&error))),
        };
        std::future::ready(sent)
    });
    Ok(Response::new(Box::pin(events)))
}
