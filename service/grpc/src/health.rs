//! `grpc.health.v1`: the whole service as the empty name, each card as `moored.card.ID`.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::queue::StatusReport;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Sets the health of the service and its cards, and updates it until the service leaves. The first statuses are set when
/// this returns: until then a reporter has the whole service as serving.
pub(crate) async fn report(
    reporter: HealthReporter,
    reports: watch::Receiver<Arc<StatusReport>>,
    leaving: watch::Receiver<bool>,
) {
    let mut known = BTreeMap::new();
    let (first, down) = (reports.borrow().clone(), *leaving.borrow());
    set_all(&reporter, &mut known, &first, down).await;
    tokio::spawn(follow(reporter, known, reports, leaving));
}

async fn follow(
    reporter: HealthReporter,
    mut known: BTreeMap<String, bool>,
    mut reports: watch::Receiver<Arc<StatusReport>>,
    mut leaving: watch::Receiver<bool>,
) {
    loop {
        let down = *leaving.borrow();
        let report = reports.borrow_and_update().clone();
        set_all(&reporter, &mut known, &report, down).await;
        if down {
            return;
        }
        tokio::select! {
            changed = reports.changed() => if changed.is_err() { break },
            changed = leaving.changed() => if changed.is_err() { break },
        }
    }
    // The queue or the service has ended: so nothing serves, even if the last report differs.
    let last = reports.borrow().clone();
    set_all(&reporter, &mut known, &last, true).await;
}

/// Sets the health of each card, and of the service, which serves while one card does.
async fn set_all(
    reporter: &HealthReporter,
    known: &mut BTreeMap<String, bool>,
    report: &StatusReport,
    down: bool,
) {
    let mut any = false;
    for card in &report.cards {
        let serves = !down && card.state.is_ready();
        any |= serves;
        let name = format!("moored.card.{}", card.description.id);
        set(reporter, known, name, serves).await;
    }
    set(reporter, known, String::new(), any).await;
}

async fn set(reporter: &HealthReporter, known: &mut BTreeMap<String, bool>, service: String, serves: bool) {
    if known.get(&service) == Some(&serves) {
        return;
    }
    let status = if serves {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    reporter.set_service_status(&service, status).await;
    known.insert(service, serves);
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::queue::{CardState, CardStatus};
    use gpu::{CardDescription, CardKind};
    use residency::{Bytes, Ledger, Millis};
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Answer;
    use tonic_health::pb::health_server::Health;
    use tonic_health::server::HealthService;

    async fn health_of(reporter: &HealthReporter) -> Option<i32> {
        let service = HealthService::from_health_reporter(reporter.clone());
        let asked = tonic::Request::new(HealthCheckRequest::default());
        let answer = service.check(asked).await;
        answer.map(|answer| answer.into_inner().status).ok()
    }

    fn with_a_ready_card() -> StatusReport {
        let total = Bytes::gib(1);
        let description = CardDescription {
            id: "sim:0".to_owned(),
            kind: CardKind::Simulated,
            name: String::new(),
            total,
            compute_capability: None,
            compute_dtype: "f32".to_owned(),
            peers: gpu::Peers::All,
        };
        StatusReport {
            cards: vec![CardStatus {
                problem: String::new(),
                description,
                attention: String::new(),
                state: CardState::Ready,
                generation: 1,
                restarts: 0,
                ledger: Arc::new(Ledger::new(total, Bytes::ZERO)),
                ledger_now: Millis(0),
                job: None,
                streamed: Vec::new(),
                reservations: Vec::new(),
            }],
            ..StatusReport::default()
        }
    }

    #[tokio::test]
    async fn health_is_not_serving_after_the_queue_has_ended() {
        let (reporter, _) = tonic_health::server::health_reporter();
        let (reports, reported) = watch::channel(Arc::new(with_a_ready_card()));
        let (_stop, stopping) = watch::channel(false);
        let follower = super::follow(reporter.clone(), BTreeMap::new(), reported, stopping);
        let follower = tokio::spawn(follower);
        tokio::task::yield_now().await;
        assert_eq!(health_of(&reporter).await, Some(i32::from(Answer::Serving)));
        drop(reports);
        follower.await.unwrap();
        assert_eq!(health_of(&reporter).await, Some(i32::from(Answer::NotServing)));
    }

    #[tokio::test]
    async fn health_is_not_serving_before_a_card_is_ready() {
        let (reporter, _) = tonic_health::server::health_reporter();
        let (_reports, reported) = watch::channel(Arc::new(StatusReport::default()));
        let (_stop, stopping) = watch::channel(false);
        report(reporter.clone(), reported, stopping).await;
        // The spawned task has not run yet: the test has one thread.
        assert_eq!(health_of(&reporter).await, Some(i32::from(Answer::NotServing)));
    }
}
