//! gRPC-Web, the gRPC of pages: a browser shows no trailers, so they are a last message of the body. Its requests become requests of gRPC
//! before any other layer sees them, and so have the same tokens, roles and limits.

use std::convert::Infallible;
use std::task::{Context, Poll};

use futures::future::Either;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::header::CONTENT_TYPE;
use tonic::codegen::http::{Request, Response};
use tonic_web::{GrpcWebLayer, GrpcWebService};
use tower_layer::Layer as _;

use crate::protocol::FromPage;

/// Beginning of the content type of gRPC-Web.
const GRPC_WEB: &[u8] = b"application/grpc-web";

/// A service of gRPC and HTTP that takes gRPC-Web too.
#[derive(Clone)]
pub(crate) struct WithGrpcWeb<S> {
    inner: S,
    translated: GrpcWebService<S>,
}

impl<S: Clone> WithGrpcWeb<S> {
    pub(crate) fn new(inner: S) -> WithGrpcWeb<S> {
        WithGrpcWeb {
            translated: GrpcWebLayer::new().layer(inner.clone()),
            inner,
        }
    }
}

impl<S> Service<Request<Body>> for WithGrpcWeb<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<<GrpcWebService<S> as Service<Request<Body>>>::Future, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let given = request.headers().get(CONTENT_TYPE);
        if given.is_none_or(|given| !given.as_bytes().starts_with(GRPC_WEB)) {
            return Either::Right(self.inner.call(request));
        }
        request.extensions_mut().insert(FromPage);
        Either::Left(self.translated.call(request))
    }
}
