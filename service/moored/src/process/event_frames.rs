//! Events, in and out of frames.

use std::sync::Arc;

use bytes::Bytes as Raw;
use engine::messages::{Answer, Completed, Event, Failure, Outcome, Progress, Shortage, Ticket};
use gpu::{CardDescription, CardKind, Unloaded};
use pipelines::StageOutput;
use residency::{Bytes, ComponentId, WaitCause};

use super::frames::FrameError;
use super::noun_frames::{
    component_in, component_out, holders_in, holders_out, need, tensor_in, tensor_out, text_in, text_out,
};
use crate::proto::worker as wire;
use crate::proto::worker::answer::Answer as AnswerFrame;
use crate::proto::worker::completed::Output as OutputFrame;
use crate::proto::worker::event::Event as Frame;
use crate::proto::worker::failure::Failure as FailureFrame;
use crate::proto::worker::finished::Outcome as OutcomeFrame;
use crate::proto::worker::progress::Progress as ProgressFrame;

/// An event as it is sent.
pub(crate) fn event_out(event: &Event) -> wire::Event {
    let frame = match event {
        Event::Ready { card, attention } => Frame::Ready(card_out(card, attention)),
        Event::Snapshot(ledger) => {
            Frame::Snapshot(serde_json::to_vec(ledger.as_ref()).unwrap_or_default().into())
        }
        Event::Progress { ticket, progress } => Frame::Progress(progress_out(*ticket, progress)),
        Event::Finished { ticket, outcome } => Frame::Finished(finished_out(*ticket, outcome)),
        Event::Answer { id, answer } => Frame::Answer(answer_out(*id, answer)),
    };
    wire::Event { event: Some(frame) }
}

/// What the supervisor reads.
pub(crate) enum Outgoing {
    /// The worker could not open its card.
    Refused(String),
    /// All others.
    Event(Event),
}

/// An event as it is read.
pub(crate) fn event_in(event: wire::Event) -> Result<Outgoing, FrameError> {
    Ok(Outgoing::Event(match need(event.event, "an event")? {
        Frame::Refused(why) => return Ok(Outgoing::Refused(why)),
        Frame::Ready(mut card) => Event::Ready {
            attention: std::mem::take(&mut card.attention),
            card: card_in(card),
        },
        Frame::Snapshot(ledger) => Event::Snapshot(Arc::new(serde_json::from_slice(&ledger)?)),
        Frame::Progress(progress) => {
            let ticket = Ticket(progress.ticket);
            Event::Progress {
                ticket,
                progress: progress_in(need(progress.progress, "progress")?)?,
            }
        }
        Frame::Finished(finished) => Event::Finished {
            ticket: Ticket(finished.ticket),
            outcome: outcome_in(need(finished.outcome, "an outcome")?)?,
        },
        Frame::Answer(answer) => Event::Answer {
            id: answer.id,
            answer: answer_in(need(answer.answer, "an answer")?)?,
        },
    }))
}

fn card_out(card: &CardDescription, attention: &str) -> wire::Card {
    let kind = match card.kind {
        CardKind::Cpu => wire::CardKind::Cpu,
        CardKind::Simulated => wire::CardKind::Simulated,
        CardKind::Cuda => wire::CardKind::Cuda,
    };
    wire::Card {
        id: card.id.clone(),
        kind: kind.into(),
        name: card.name.clone(),
        total: card.total.0,
        compute_capability: card
            .compute_capability
            .map(|(a, b)| vec![a, b])
            .unwrap_or_default(),
        compute_dtype: card.compute_dtype.clone(),
        attention: attention.to_owned(),
    }
}

fn card_in(card: wire::Card) -> CardDescription {
    CardDescription {
        kind: match card.kind() {
            wire::CardKind::Cpu => CardKind::Cpu,
            wire::CardKind::Simulated => CardKind::Simulated,
            wire::CardKind::Cuda => CardKind::Cuda,
        },
        id: card.id,
        name: card.name,
        total: Bytes(card.total),
        compute_capability: match card.compute_capability[..] {
            [major, minor] => Some((major, minor)),
            _ => None,
        },
        compute_dtype: card.compute_dtype,
    }
}

fn progress_out(ticket: Ticket, progress: &Progress) -> wire::Progress {
    let frame = match progress {
        Progress::Evicting(component) => ProgressFrame::Evicting(component_out(component)),
        Progress::Loading { component, done } => ProgressFrame::Loading(wire::Loading {
            component: Some(component_out(component)),
            done: done.0,
        }),
        Progress::Started { chunking } => ProgressFrame::Started(chunking.clone()),
        Progress::Step { n, of } => ProgressFrame::Step(wire::Step { n: *n, of: *of }),
        Progress::Preview {
            step,
            width,
            height,
            rgb,
        } => ProgressFrame::Preview(wire::Preview {
            step: *step,
            picture: Some(wire::Picture {
                width: *width,
                height: *height,
                rgb: Raw::from_owner(rgb.clone()),
            }),
        }),
        Progress::Retrying { reason, message } => ProgressFrame::Retrying(wire::Retrying {
            reason: reason.clone(),
            message: message.clone(),
        }),
    };
    wire::Progress {
        ticket: ticket.0,
        progress: Some(frame),
    }
}

fn progress_in(frame: ProgressFrame) -> Result<Progress, FrameError> {
    Ok(match frame {
        ProgressFrame::Evicting(component) => Progress::Evicting(component_in(component)),
        ProgressFrame::Loading(loading) => Progress::Loading {
            component: component_in(need(loading.component, "a component")?),
            done: Bytes(loading.done),
        },
        ProgressFrame::Started(chunking) => Progress::Started { chunking },
        ProgressFrame::Step(step) => Progress::Step {
            n: step.n,
            of: step.of,
        },
        ProgressFrame::Preview(preview) => {
            let picture = need(preview.picture, "a picture")?;
            Progress::Preview {
                step: preview.step,
                width: picture.width,
                height: picture.height,
                rgb: Arc::from(&picture.rgb[..]),
            }
        }
        ProgressFrame::Retrying(retrying) => Progress::Retrying {
            reason: retrying.reason,
            message: retrying.message,
        },
    })
}

fn finished_out(ticket: Ticket, outcome: &Outcome) -> wire::Finished {
    let frame = match outcome {
        Outcome::Completed(completed) => OutcomeFrame::Completed(completed_out(completed)),
        Outcome::Wait(shortage) => OutcomeFrame::Wait(shortage_out(shortage)),
        Outcome::Never { needed, capacity } => OutcomeFrame::Never(wire::Never {
            needed: needed.0,
            capacity: capacity.0,
        }),
        Outcome::Cancelled => OutcomeFrame::Cancelled(wire::Cancelled {}),
        Outcome::Failed(failure) => OutcomeFrame::Failed(failure_out(failure)),
    };
    wire::Finished {
        ticket: ticket.0,
        outcome: Some(frame),
    }
}

fn outcome_in(frame: OutcomeFrame) -> Result<Outcome, FrameError> {
    Ok(match frame {
        OutcomeFrame::Completed(completed) => Outcome::Completed(Box::new(completed_in(completed)?)),
        OutcomeFrame::Wait(shortage) => Outcome::Wait(shortage_in(shortage)),
        OutcomeFrame::Never(never) => Outcome::Never {
            needed: Bytes(never.needed),
            capacity: Bytes(never.capacity),
        },
        OutcomeFrame::Cancelled(wire::Cancelled {}) => Outcome::Cancelled,
        OutcomeFrame::Failed(failure) => Outcome::Failed(failure_in(need(failure.failure, "a failure")?)),
    })
}

fn completed_out(completed: &Completed) -> wire::Completed {
    let output = completed.output.as_ref().map(|output| match output {
        StageOutput::Text(text) => OutputFrame::Text(wire::EncodedText {
            tensors: text_out(text),
        }),
        StageOutput::Latent(latent) => OutputFrame::Latent(tensor_out(latent)),
        StageOutput::Picture { width, height, rgb } => OutputFrame::Picture(wire::Picture {
            width: *width,
            height: *height,
            rgb: Raw::from(rgb.clone()),
        }),
    });
    wire::Completed {
        output,
        chunking: completed.chunking.clone(),
        approximate: completed.approximate,
        resident_already: completed.resident_already.clone(),
        move_ms: completed.move_ms,
        run_ms: completed.run_ms,
        predicted_scratch: completed.predicted_scratch.0,
        peak_scratch: completed.peak_scratch.0,
        peak_bytes: completed.peak_bytes.0,
        attention: completed.attention.clone(),
        room: completed.room.0,
        load_seconds: completed
            .load_seconds
            .iter()
            .map(|(id, seconds)| wire::LoadTime {
                component: id.to_string(),
                seconds: *seconds,
            })
            .collect(),
    }
}

fn completed_in(completed: wire::Completed) -> Result<Completed, FrameError> {
    let output = match completed.output {
        None => None,
        Some(OutputFrame::Text(text)) => Some(StageOutput::Text(text_in(text.tensors)?)),
        Some(OutputFrame::Latent(latent)) => Some(StageOutput::Latent(tensor_in(latent))),
        Some(OutputFrame::Picture(picture)) => Some(StageOutput::Picture {
            width: picture.width,
            height: picture.height,
            rgb: picture.rgb.into(),
        }),
    };
    Ok(Completed {
        output,
        chunking: completed.chunking,
        approximate: completed.approximate,
        resident_already: completed.resident_already,
        move_ms: completed.move_ms,
        run_ms: completed.run_ms,
        predicted_scratch: Bytes(completed.predicted_scratch),
        peak_scratch: Bytes(completed.peak_scratch),
        peak_bytes: Bytes(completed.peak_bytes),
        attention: completed.attention,
        room: Bytes(completed.room),
        load_seconds: completed
            .load_seconds
            .into_iter()
            .map(|load| (ComponentId::new(load.component), load.seconds))
            .collect(),
    })
}

fn shortage_out(shortage: &Shortage) -> wire::Shortage {
    let cause = match shortage.cause {
        WaitCause::LateEviction => wire::WaitCause::LateEviction,
        WaitCause::Leases => wire::WaitCause::Leases,
        WaitCause::Foreign => wire::WaitCause::Foreign,
        WaitCause::Reservation => wire::WaitCause::Reservation,
    };
    wire::Shortage {
        short: shortage.short.0,
        needed: shortage.needed.0,
        usable: shortage.usable.0,
        cause: cause.into(),
        holders: holders_out(&shortage.holders),
    }
}

fn shortage_in(shortage: wire::Shortage) -> Shortage {
    Shortage {
        cause: match shortage.cause() {
            wire::WaitCause::LateEviction => WaitCause::LateEviction,
            wire::WaitCause::Leases => WaitCause::Leases,
            wire::WaitCause::Foreign => WaitCause::Foreign,
            wire::WaitCause::Reservation => WaitCause::Reservation,
        },
        short: Bytes(shortage.short),
        needed: Bytes(shortage.needed),
        usable: Bytes(shortage.usable),
        holders: holders_in(shortage.holders),
    }
}

fn failure_out(failure: &Failure) -> wire::Failure {
    let frame = match failure {
        Failure::OutOfMemory {
            stage,
            needed,
            usable,
            holders,
        } => FailureFrame::OutOfMemory(wire::OutOfMemory {
            stage: stage.clone(),
            needed: needed.0,
            usable: usable.0,
            holders: holders_out(holders),
        }),
        Failure::NotFinite { component, step } => FailureFrame::NotFinite(wire::NotFinite {
            component: component.clone(),
            step: *step,
        }),
        Failure::Model { message } => FailureFrame::Model(message.clone()),
        Failure::BadInput(message) => FailureFrame::BadInput(message.clone()),
        Failure::Internal(message) => FailureFrame::Internal(message.clone()),
    };
    wire::Failure { failure: Some(frame) }
}

fn failure_in(frame: FailureFrame) -> Failure {
    match frame {
        FailureFrame::OutOfMemory(oom) => Failure::OutOfMemory {
            stage: oom.stage,
            needed: Bytes(oom.needed),
            usable: Bytes(oom.usable),
            holders: holders_in(oom.holders),
        },
        FailureFrame::NotFinite(found) => Failure::NotFinite {
            component: found.component,
            step: found.step,
        },
        FailureFrame::Model(message) => Failure::Model { message },
        FailureFrame::BadInput(message) => Failure::BadInput(message),
        FailureFrame::Internal(message) => Failure::Internal(message),
    }
}

fn answer_out(id: u64, answer: &Answer) -> wire::Answer {
    let frame = match answer {
        Answer::Unloaded { freed, kept, short } => AnswerFrame::Unloaded(wire::Unloaded {
            freed: freed
                .iter()
                .map(|(component, unloaded)| wire::Freed {
                    component: Some(component_out(component)),
                    booked: unloaded.booked.0,
                    freed: unloaded.freed.0,
                })
                .collect(),
            kept: kept
                .iter()
                .map(|(component, reason)| wire::Kept {
                    component: Some(component_out(component)),
                    reason: reason.clone(),
                })
                .collect(),
            short: short.0,
        }),
        Answer::Trimmed(bytes) => AnswerFrame::Trimmed(bytes.0),
        Answer::Failed(why) => AnswerFrame::Failed(why.clone()),
    };
    wire::Answer {
        id,
        answer: Some(frame),
    }
}

fn answer_in(frame: AnswerFrame) -> Result<Answer, FrameError> {
    Ok(match frame {
        AnswerFrame::Unloaded(unloaded) => Answer::Unloaded {
            freed: unloaded
                .freed
                .into_iter()
                .map(|f| {
                    let bytes = Unloaded {
                        booked: Bytes(f.booked),
                        freed: Bytes(f.freed),
                    };
                    Ok((component_in(need(f.component, "a component")?), bytes))
                })
                .collect::<Result<_, FrameError>>()?,
            kept: unloaded
                .kept
                .into_iter()
                .map(|k| Ok((component_in(need(k.component, "a component")?), k.reason)))
                .collect::<Result<_, FrameError>>()?,
            short: Bytes(unloaded.short),
        },
        AnswerFrame::Trimmed(bytes) => Answer::Trimmed(Bytes(bytes)),
        AnswerFrame::Failed(why) => Answer::Failed(why),
    })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// What the supervisor reads when the worker says it, through the bytes of a frame.
    fn through_a_frame(event: &Event) -> Event {
        let bytes = event_out(event).encode_to_vec();
        match event_in(wire::Event::decode(&bytes[..]).unwrap()).unwrap() {
            Outgoing::Event(read) => read,
            Outgoing::Refused(why) => panic!("refused: {why}"),
        }
    }

    #[test]
    fn a_worker_that_is_ready_says_what_it_is() {
        let ready = Event::Ready {
            card: CardDescription {
                id: "GPU-1a".to_owned(),
                kind: CardKind::Cuda,
                name: "a device".to_owned(),
                total: Bytes::gib(80),
                compute_capability: Some((9, 0)),
                compute_dtype: "bf16".to_owned(),
            },
            attention: "own kernels: libcudnn.so.9 cannot be loaded".to_owned(),
        };
        assert_eq!(through_a_frame(&ready), ready);
    }

    #[test]
    fn what_a_stage_reports_arrives_whole() {
        let completed = Completed {
            output: Some(StageOutput::Picture {
                width: 2,
                height: 1,
                rgb: vec![1, 2, 3, 4, 5, 6],
            }),
            chunking: "strips of 16".to_owned(),
            approximate: true,
            resident_already: vec!["vae".to_owned()],
            move_ms: 1,
            run_ms: 2,
            room: Bytes(3),
            predicted_scratch: Bytes(4),
            peak_scratch: Bytes(5),
            peak_bytes: Bytes(6),
            attention: "cudnn 9.19.0, own kernels".to_owned(),
            load_seconds: vec![(ComponentId::new("vae@1"), 0.5)],
        };
        let finished = Event::Finished {
            ticket: Ticket(7),
            outcome: Outcome::Completed(Box::new(completed)),
        };
        assert_eq!(through_a_frame(&finished), finished);
    }
}
