//! The page, from the files of `page/dist`: `page/README.md` says how they are made. What it shows it asks for by gRPC-Web, as every
//! other client asks.

use axum::Router;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use calls::Service;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use rust_embed::{EmbeddedFile, RustEmbed};
use tower_http::compression::CompressionLayer;

use crate::errors::Failure;
use crate::openapi;

/// The files, which are in the program.
#[derive(RustEmbed)]
#[folder = "page/dist"]
struct Files;

/// What the page may do: its own scripts and styles, calls to this service, and results, which it has as blobs.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Names of assets have the hash of what is in them.
const FOREVER: &str = "public, max-age=31536000, immutable";

/// What is text and the same for everybody, compressed.
pub(crate) fn routes() -> Router<Service> {
    Router::new()
        .route("/", get(index))
        .route("/assets/{file}", get(asset))
        .route("/openapi.json", get(openapi::served))
        .layer(CompressionLayer::new())
}

/// The page.
#[utoipa::path(get, path = "/", tag = "page", responses((status = 200, content_type = "text/html", body = String)))]
pub(crate) async fn index() -> Response {
    match Files::get("index.html") {
        Some(page) => served(page, "no-cache"),
        None => Failure::no_path("/").into_response(),
    }
}

/// A file of the page.
#[utoipa::path(get, path = "/assets/{file}", tag = "page", params(("file" = String, Path)),
    responses((status = 200, description = "A script, a style or a picture", body = String), (status = 404, body = crate::errors::ErrorBody)))]
pub(crate) async fn asset(file: Result<Path<String>, PathRejection>) -> Result<Response, Failure> {
    let Path(file) = file?;
    match Files::get(&format!("assets/{file}")) {
        Some(asset) => Ok(served(asset, FOREVER)),
        None => Err(Failure::no_path(&format!("/assets/{file}"))),
    }
}

fn served(file: EmbeddedFile, cached: &'static str) -> Response {
    let head = [
        (CONTENT_TYPE, file.metadata.mimetype().to_owned()),
        (CACHE_CONTROL, cached.to_owned()),
        (CONTENT_SECURITY_POLICY, POLICY.to_owned()),
        (REFERRER_POLICY, "no-referrer".to_owned()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (head, file.data).into_response()
}
