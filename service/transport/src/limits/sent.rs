//! The answers of calls. An answer that its client does not read for too long is dropped, with all that it holds.

use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;

use super::calls_layer::OpenCall;
use super::lock;
use crate::protocol::Protocol;
use crate::refusal::Refusal;

/// The answers that are being sent.
pub(super) struct Readers {
    /// Time that an answer may stay unread.
    unread: Duration,
    answers: Mutex<Vec<Weak<Mutex<Answer>>>>,
}

struct Answer {
    /// `None` once it was dropped as unread.
    body: Option<Body>,
    /// Time of the last poll that gave a frame; `None` while the client waits for the service.
    ready_since: Option<Instant>,
    unread_for: Option<Duration>,
}

impl Readers {
    pub(super) fn new(unread: Duration) -> Readers {
        Readers {
            unread,
            answers: Mutex::default(),
        }
    }

    /// Watches an answer, whose call counts until it is sent.
    pub(super) fn follow(
        &self,
        body: Body,
        call: OpenCall,
        span: tracing::Span,
        protocol: &'static Protocol,
    ) -> Sent {
        let answer = Arc::new(Mutex::new(Answer {
            body: Some(body),
            ready_since: Some(Instant::now()),
            unread_for: None,
        }));
        let mut answers = lock(&self.answers);
        if answers.len() == answers.capacity() {
            answers.retain(|answer| answer.strong_count() > 0);
        }
        answers.push(Arc::downgrade(&answer));
        Sent {
            answer,
            span,
            protocol,
            _call: call,
        }
    }

    /// Drops unread answers for as long as this is polled.
    pub(super) async fn watch(&self) {
        // Four checks in the time: an answer is dropped at most a quarter late.
        let mut looks = tokio::time::interval((self.unread / 4).max(Duration::from_millis(1)));
        loop {
            looks.tick().await;
            self.give_up_unread();
        }
    }

    fn give_up_unread(&self) {
        lock(&self.answers).retain(|answer| {
            let Some(answer) = answer.upgrade() else {
                return false;
            };
            let body = {
                let mut answer = lock(&answer);
                let is_late = |since: Instant| since.elapsed() >= self.unread;
                if !answer.ready_since.is_some_and(is_late) {
                    return true;
                }
                answer.unread_for = Some(self.unread);
                answer.body.take()
            };
            drop(body); // outside the lock: it ends a job's listener
            false
        });
    }
}

/// The body of an answer. HTTP/2 polls it only when the client's window has space.
pub(super) struct Sent {
    answer: Arc<Mutex<Answer>>,
    span: tracing::Span,
    protocol: &'static Protocol,
    _call: OpenCall,
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let _entered = self.span.enter();
        let mut answer = lock(&self.answer);
        let Some(body) = &mut answer.body else {
            let told = answer.unread_for.take().map(|unread| {
                let unread = humantime::format_duration(unread);
                let problem = format!(
                    "nothing of this answer was read for {unread}, so it was dropped: read it as it arrives, or raise limits.unread"
                );
                self.protocol.end(Refusal::ClientLimit(problem))
            });
            return Poll::Ready(told);
        };
        let frame = Pin::new(body).poll_frame(context);
        answer.ready_since = frame.is_ready().then(Instant::now);
        frame
    }

    fn is_end_stream(&self) -> bool {
        lock(&self.answer).body.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let answer = lock(&self.answer);
        answer.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use http_body::Body as _;

    use super::*;
    use crate::limits::uploads::tests::UnfinishedBody;
    use crate::protocol::tests::GRPC;
    use calls::Budget;

    const UNREAD: Duration = Duration::from_secs(600);

    async fn next(sent: &mut Sent) -> Option<Frame<Bytes>> {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *sent).poll_frame(context)).await;
        frame.transpose().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_unread_answer_ends_with_an_error_for_its_late_reader() {
        let (readers, budget) = (Readers::new(UNREAD), Budget::new(9, 9));
        let call = || OpenCall::counted(budget.take(None, 1).unwrap());
        let mut unread = readers.follow(
            UnfinishedBody::body(&[5, 5]),
            call(),
            tracing::Span::none(),
            &GRPC,
        );
        let mut waiting = readers.follow(UnfinishedBody::body(&[5]), call(), tracing::Span::none(), &GRPC);
        for sent in [&mut unread, &mut waiting] {
            assert!(next(sent).await.is_some_and(|frame| frame.is_data()));
        }
        let nothing = futures::poll!(std::pin::pin!(next(&mut waiting)));
        assert!(nothing.is_pending());
        let watched = tokio::time::timeout(UNREAD * 2, readers.watch()).await;
        assert!(watched.is_err());
        assert!(lock(&unread.answer).body.is_none(), "what it holds is dropped");
        assert!(
            lock(&waiting.answer).body.is_some(),
            "this one waits for the service"
        );
        let told = next(&mut unread)
            .await
            .and_then(|frame| frame.into_trailers().ok())
            .unwrap();
        assert_eq!(told["grpc-status"], "8");
        assert!(next(&mut unread).await.is_none());
        drop((unread, waiting));
        assert_eq!(budget.taken(), 0);
    }
}
