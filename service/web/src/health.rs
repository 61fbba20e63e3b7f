//! `/livez` and `/readyz`, for load balancers and orchestrators.

use axum::extract::State;
use calls::Service;
use http::StatusCode;

/// Whether the service answers at all.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String)))]
pub(crate) async fn live() -> &'static str {
    "ok\n"
}

/// Whether it takes jobs: a card is ready, and the service is not shutting down.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String), (status = 503, body = String)))]
pub(crate) async fn ready(State(service): State<Service>) -> (StatusCode, String) {
    if *service.leaving.borrow() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the service is shutting down\n".to_owned(),
        );
    }
    let report = service.card_memory.reports().borrow().clone();
    match report.cards.iter().any(|card| card.state.is_ready()) {
        true => (StatusCode::OK, "ok\n".to_owned()),
        false => (StatusCode::SERVICE_UNAVAILABLE, "no card is ready\n".to_owned()),
    }
}
