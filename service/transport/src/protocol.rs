//! What a protocol brings to the transport.

use bytes::Bytes;
use http_body::Frame;
use tonic::Status;
use tonic::codegen::http::header::CONTENT_TYPE;
use tonic::codegen::http::{Request, Version};

use crate::methods::Method;
use crate::refusal::{Answer, Refusal};

/// Beginning of the content type of gRPC's requests.
const GRPC: &[u8] = b"application/grpc";

/// A protocol: its methods, and how it refuses calls.
#[derive(Debug)]
pub struct Protocol {
    /// Its name in metrics.
    pub name: &'static str,
    pub methods: &'static [Method],
    /// What a request for none of its methods needs. After that it is answered that there is no such method.
    pub unknown: Method,
    pub answer: Answer,
    /// Whether an answer that has begun may end with headers that say why. Else its connection breaks.
    pub has_trailers: bool,
}

/// A mark of requests that came by gRPC-Web, the gRPC of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FromPage;

/// Whether it came by gRPC-Web.
pub(crate) fn is_from_page<B>(request: &Request<B>) -> bool {
    request.extensions().get::<FromPage>().is_some()
}

/// The protocols of a service.
#[derive(Clone, Copy, Debug)]
pub struct Protocols {
    pub grpc: &'static Protocol,
    /// Of every request that is none of gRPC's.
    pub http: &'static Protocol,
}

impl Protocols {
    /// The protocol of a request.
    pub(crate) fn of<B>(self, request: &Request<B>) -> &'static Protocol {
        match self.is_grpc(request) {
            true => self.grpc,
            false => self.http,
        }
    }

    /// Whether it is one of gRPC's, which needs HTTP/2 but for pages.
    pub(crate) fn is_grpc<B>(self, request: &Request<B>) -> bool {
        let given = request.headers().get(CONTENT_TYPE);
        let is_named_so = given.is_some_and(|given| given.as_bytes().starts_with(GRPC));
        is_named_so && (request.version() == Version::HTTP_2 || is_from_page(request))
    }
}

impl Protocol {
    /// How an answer that has begun ends with a refusal: by headers that say why, or as a broken connection.
    pub(crate) fn end(&self, refusal: Refusal) -> Result<Frame<Bytes>, Status> {
        if !self.has_trailers {
            return Err(refusal.into());
        }
        let mut headers = (self.answer)(refusal).into_parts().0.headers;
        headers.remove(CONTENT_TYPE); // it was sent when the answer began
        Ok(Frame::trailers(headers))
    }

    /// The method that a request calls.
    pub(crate) fn method<B>(&'static self, request: &Request<B>) -> &'static Method {
        let path = request.uri().path();
        let path = path.strip_prefix('/').unwrap_or(path);
        let verb = request.method().as_str();
        let mut methods = self.methods.iter();
        methods
            .find(|method| method.is_at(verb, path))
            .unwrap_or(&self.unknown)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// gRPC without methods.
    pub(crate) const GRPC: Protocol = Protocol {
        name: "grpc",
        methods: &[],
        unknown: Method::public(""),
        answer: |refusal| Status::from(refusal).into_http(),
        has_trailers: true,
    };
}
