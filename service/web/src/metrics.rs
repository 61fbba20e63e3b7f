//! `/metrics`, as Prometheus reads it.

use axum::extract::State;
use axum::response::IntoResponse;
use calls::Service;
use http::header::CONTENT_TYPE;

use crate::errors::Failure;

/// The text format of OpenMetrics.
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Counters since the service started, and its state.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics",
    responses((status = 200, content_type = "application/openmetrics-text", body = String),
        (status = "4XX", body = crate::errors::ErrorBody), (status = "5XX", body = crate::errors::ErrorBody)))]
pub(crate) async fn scrape(State(service): State<Service>) -> Result<impl IntoResponse, Failure> {
    let status = service.card_memory.status().await;
    let text = service.metrics.text(&status)?;
    Ok(([(CONTENT_TYPE, TEXT)], text))
}
