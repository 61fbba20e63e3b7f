//! `/v1/models`: the models of the service.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use calls::{ListedModel, Service};
use engine::Error;
use model::Medium;
use serde::Serialize;
use utoipa::ToSchema;

use crate::errors::{ErrorBody, Failure};
use crate::routes::Client;

/// A list of models.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Models {
    object: &'static str,
    data: Vec<Model>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    /// Always 0: files have no date that is the model's.
    created: u64,
    owned_by: &'static str,
    /// `image`, `video` or `audio`: what it makes.
    media: &'static str,
    family: String,
    is_default: bool,
    /// Names of its components that are on a card.
    resident: Vec<String>,
}

fn model_out(listed: ListedModel) -> Option<Model> {
    let details = listed.details.ok()?;
    let media = match details.defaults.medium {
        Medium::Image(_) => "image",
        Medium::Video(_) => "video",
        Medium::Audio(_) => "audio",
    };
    Some(Model {
        id: listed.id,
        object: "model",
        created: 0,
        owned_by: "moored",
        media,
        family: details.family,
        is_default: listed.is_default,
        resident: details.resident,
    })
}

/// Models that can be used.
#[utoipa::path(get, path = "/v1/models", tag = "models", operation_id = "list_models",
    responses((status = 200, body = Models), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn list(State(service): State<Service>, client: Client) -> Result<Json<Models>, Failure> {
    let listing = service.card_memory.list_models(false, &client.caller).await?;
    let data = listing.models.into_iter().filter_map(model_out).collect();
    Ok(Json(Models { object: "list", data }))
}

/// One model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models", operation_id = "get_model", params(("model" = String, Path)),
    responses((status = 200, body = Model), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn one(
    State(service): State<Service>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, Failure> {
    let Path(id) = id?;
    let listing = service.card_memory.list_models(false, &client.caller).await?;
    let found = listing.models.into_iter().find(|listed| listed.id == id);
    let found = found.and_then(model_out).map(Json);
    found.ok_or_else(|| Error::ModelNotFound { id }.into())
}
