//! What a method's calls may send and which places they may take, by its full name.

use std::time::Duration;

use calls::SESSION_MESSAGE_BYTES;

/// Most bytes of a request without media and latents. A prompt is 40 KB at the most.
const SMALL_REQUEST_BYTES: u64 = 1 << 20;
/// The same where the caller need not have a token.
const PUBLIC_REQUEST_BYTES: u64 = 64 << 10;
/// Longest silence of a session's client; the session itself ends earlier.
const SESSION_IDLE: Duration = Duration::from_secs(2 * 3600);

/// What is taken as request of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requests {
    /// No media and no latents.
    Small,
    /// Media or latents.
    Large,
    /// The handler counts the messages as they come, and keeps them.
    SelfCounted,
    /// The request lasts as long as a session, which has its own limit of silence and takes short messages one by one.
    Session,
}

impl Requests {
    /// Of a method by its path without the first slash, `package.Service/Method`.
    pub(super) fn of(path: &str) -> Requests {
        match path {
            "moored.v1.Generation/GenerateImage"
            | "moored.v1.Generation/GenerateVideo"
            | "moored.v1.Generation/EncodeImage"
            | "moored.v1.Generation/PutLatent"
            | "moored.v1.Residency/Plan" => Requests::Large,
            "moored.v1.Generation/PutMedia" => Requests::SelfCounted,
            "moored.v1.Generation/StreamAudio" => Requests::Session,
            _ => Requests::Small,
        }
    }

    /// The longest request.
    pub(super) fn longest_bytes(self, is_public: bool) -> u64 {
        match self {
            Requests::Small if is_public => PUBLIC_REQUEST_BYTES,
            Requests::Small => SMALL_REQUEST_BYTES,
            Requests::Large | Requests::SelfCounted | Requests::Session => u64::MAX,
        }
    }

    /// The longest message of a stream; `None` where a request is one message. A message that is arriving counts against the client,
    /// and one that has come is its handler's to count.
    pub(super) fn longest_message_bytes(self) -> Option<u64> {
        match self {
            Requests::Small | Requests::Large => None,
            Requests::SelfCounted => Some(u64::MAX), // as for other messages: service.max_message
            Requests::Session => Some(SESSION_MESSAGE_BYTES),
        }
    }

    /// The longest pause in a request, where others may have pauses of `usual`.
    pub(super) fn idle(self, usual: Duration) -> Duration {
        match self {
            Requests::Session => SESSION_IDLE,
            Requests::Small | Requests::Large | Requests::SelfCounted => usual,
        }
    }
}

/// Whether a method shows health, status or jobs, or cancels: its calls may use the spare ones.
pub(super) fn is_spare(path: &str) -> bool {
    matches!(
        path,
        "grpc.health.v1.Health/Check"
            | "moored.v1.Residency/GetStatus"
            | "moored.v1.Jobs/List"
            | "moored.v1.Jobs/Cancel"
    )
}

/// Whether a method needs no token: health, and reflection.
pub(super) fn is_public(path: &str) -> bool {
    let service = path.split('/').next().unwrap_or_default();
    matches!(
        service,
        "grpc.health.v1.Health"
            | "grpc.reflection.v1.ServerReflection"
            | "grpc.reflection.v1alpha.ServerReflection"
    )
}

/// Whether a method's answer lasts as long as its client likes.
pub(super) fn is_endless(path: &str) -> bool {
    path == "grpc.health.v1.Health/Watch"
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use prost::Message as _;
    use prost_types::field_descriptor_proto::Type;
    use prost_types::{DescriptorProto, FileDescriptorSet};

    use super::*;
    use api::v1;

    /// Requests of a method that has them under the name of a type.
    fn has_bytes(
        name: &str,
        messages: &BTreeMap<String, DescriptorProto>,
        seen: &mut BTreeSet<String>,
    ) -> bool {
        let Some(message) = messages.get(name).filter(|_| seen.insert(name.to_owned())) else {
            return false;
        };
        message.field.iter().any(|field| match field.r#type() {
            Type::Bytes => true,
            Type::Message => has_bytes(field.type_name(), messages, seen),
            _ => false,
        })
    }

    #[test]
    fn every_method_with_media_or_latents_in_its_requests_is_listed_and_no_other() {
        let files = FileDescriptorSet::decode(v1::DESCRIPTORS).unwrap().file;
        let ours = || files.iter().filter(|file| file.package() == "moored.v1");
        let messages: BTreeMap<String, DescriptorProto> = ours()
            .flat_map(|file| &file.message_type)
            .map(|message| (format!(".moored.v1.{}", message.name()), message.clone()))
            .collect();
        let mut spare = 0;
        for service in ours().flat_map(|file| &file.service) {
            for method in &service.method {
                let path = format!("moored.v1.{}/{}", service.name(), method.name());
                let is_large = has_bytes(method.input_type(), &messages, &mut BTreeSet::new());
                let is_small = Requests::of(&path) == Requests::Small;
                let is_session = Requests::of(&path) == Requests::Session;
                assert!(is_session || is_large != is_small, "{path}");
                assert!(!is_public(&path), "{path}");
                spare += usize::from(is_spare(&path));
            }
        }
        assert_eq!(spare, 3, "a method of the list is gone");
    }
}
