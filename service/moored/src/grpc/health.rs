//! `grpc.health.v1`: the whole service as ``, each card as `moored.card.ID`.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::queue::StatusReport;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Follows the cards' states until the service stops. The whole serves while one card does.
pub(super) async fn follow(
    reporter: HealthReporter,
    mut reports: watch::Receiver<Arc<StatusReport>>,
    mut stopping: watch::Receiver<bool>,
) {
    let mut told: BTreeMap<String, bool> = BTreeMap::new();
    loop {
        let down = *stopping.borrow();
        let report = reports.borrow_and_update().clone();
        let mut any = false;
        for card in &report.cards {
            let serves = !down && matches!(card.state, "ready" | "busy");
            any |= serves;
            tell(
                &reporter,
                &mut told,
                format!("moored.card.{}", card.description.id),
                serves,
            )
            .await;
        }
        tell(&reporter, &mut told, String::new(), any).await;
        if down {
            return;
        }
        tokio::select! {
            changed = reports.changed() => if changed.is_err() { return },
            changed = stopping.changed() => if changed.is_err() { return },
        }
    }
}

async fn tell(reporter: &HealthReporter, told: &mut BTreeMap<String, bool>, service: String, serves: bool) {
    if told.get(&service) == Some(&serves) {
        return;
    }
    let status = if serves {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    reporter.set_service_status(&service, status).await;
    told.insert(service, serves);
}
