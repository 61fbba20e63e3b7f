//! The gRPC methods, a row for each: the bounds of its requests, its access, the places of its calls, and the capability that it
//! announces.

use std::sync::Arc;
use std::time::Duration;

use access::{Holder, Role};
use calls::SESSION_MESSAGE_BYTES;

/// Most bytes of a request without media and latents. A prompt is 40 KB at the most.
const SMALL_REQUEST_BYTES: u64 = 1 << 20;
/// The same for methods that need no token.
const PUBLIC_REQUEST_BYTES: u64 = 64 << 10;
/// Longest silence of a session's client; the session itself ends earlier.
const SESSION_IDLE: Duration = Duration::from_secs(2 * 3600);

/// The kind of a method's requests, which decides their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requests {
    /// No media and no latents.
    Small,
    /// Media or latents.
    Large,
    /// The handler counts the messages as they arrive, and keeps them.
    SelfCounted,
    /// The request lasts as long as a session, which has its own limit of silence and takes short messages one by one.
    Session,
}

impl Requests {
    /// The longest request.
    pub(crate) fn longest_bytes(self, is_public: bool) -> u64 {
        match self {
            Requests::Small if is_public => PUBLIC_REQUEST_BYTES,
            Requests::Small => SMALL_REQUEST_BYTES,
            Requests::Large | Requests::SelfCounted | Requests::Session => u64::MAX,
        }
    }

    /// The longest message of a stream; `None` where a request is one message. A message counts against the client while it arrives;
    /// after that its handler counts it.
    pub(crate) fn longest_message_bytes(self) -> Option<u64> {
        match self {
            Requests::Small | Requests::Large => None,
            Requests::SelfCounted => Some(u64::MAX), // as for other messages: service.max_message
            Requests::Session => Some(SESSION_MESSAGE_BYTES),
        }
    }

    /// The longest pause in a request, where others may have pauses of `usual`.
    pub(crate) fn idle(self, usual: Duration) -> Duration {
        match self {
            Requests::Session => SESSION_IDLE,
            Requests::Small | Requests::Large | Requests::SelfCounted => usual,
        }
    }
}

/// Who may call a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Anybody.
    Nothing,
    /// Clients with a token of this role or a greater one, where tokens are asked for.
    Role(Role),
}

/// A gRPC method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Method {
    /// `package.Service/Method`.
    pub(crate) path: &'static str,
    pub(crate) requests: Requests,
    pub(crate) needs: Needs,
    /// It shows health, status or jobs, or cancels: its calls may take the spare places.
    pub(crate) is_spare: bool,
    /// It needs no token, and its answer has no end of its own.
    pub(crate) is_endless: bool,
    /// The capability that `GetServerInfo` lists for it.
    pub(crate) capability: Option<&'static str>,
}

impl Method {
    /// A method with small requests.
    const fn new(path: &'static str, needs: Needs) -> Method {
        Method {
            path,
            requests: Requests::Small,
            needs,
            is_spare: false,
            is_endless: false,
            capability: None,
        }
    }

    /// A method that needs no token.
    const fn public(path: &'static str) -> Method {
        Method::new(path, Needs::Nothing)
    }

    const fn takes(self, requests: Requests) -> Method {
        Method { requests, ..self }
    }

    const fn spare(self) -> Method {
        Method {
            is_spare: true,
            ..self
        }
    }

    const fn endless(self) -> Method {
        Method {
            is_endless: true,
            ..self
        }
    }

    const fn announces(self, capability: &'static str) -> Method {
        Method {
            capability: Some(capability),
            ..self
        }
    }
}

const OBSERVE: Needs = Needs::Role(Role::Observe);
const GENERATE: Needs = Needs::Role(Role::Generate);
const ADMINISTER: Needs = Needs::Role(Role::Administer);

/// Every method, ours and those of health and reflection. A test holds it to the descriptors.
#[rustfmt::skip] // a line each
const METHODS: [Method; 35] = [
    Method::new("moored.v1.Generation/GenerateImage", GENERATE).takes(Requests::Large).announces("text_to_image"),
    Method::new("moored.v1.Generation/GenerateVideo", GENERATE).takes(Requests::Large),
    Method::new("moored.v1.Generation/GenerateAudio", GENERATE),
    Method::new("moored.v1.Generation/StreamAudio", GENERATE).takes(Requests::Session).announces("audio_sessions"),
    Method::new("moored.v1.Generation/EncodeImage", GENERATE).takes(Requests::Large).announces("encode_image"),
    Method::new("moored.v1.Generation/DecodeLatent", GENERATE).announces("decode_latent"),
    Method::new("moored.v1.Generation/GetLatent", GENERATE),
    Method::new("moored.v1.Generation/PutLatent", GENERATE).takes(Requests::Large).announces("latents"),
    Method::new("moored.v1.Generation/ReleaseLatent", GENERATE),
    Method::new("moored.v1.Generation/PutMedia", GENERATE).takes(Requests::SelfCounted).announces("media"),
    Method::new("moored.v1.Generation/ReleaseMedia", GENERATE),
    Method::new("moored.v1.Hub/PlanPull", GENERATE),
    Method::new("moored.v1.Hub/PullModel", ADMINISTER),
    Method::new("moored.v1.Jobs/List", OBSERVE).spare(),
    Method::new("moored.v1.Jobs/Fetch", GENERATE),
    Method::new("moored.v1.Jobs/Cancel", GENERATE).spare(),
    Method::new("moored.v1.Residency/ListModels", OBSERVE),
    Method::new("moored.v1.Residency/Load", GENERATE),
    Method::new("moored.v1.Residency/Unload", ADMINISTER),
    Method::new("moored.v1.Residency/Pin", ADMINISTER),
    Method::new("moored.v1.Residency/Hold", GENERATE),
    Method::new("moored.v1.Residency/ReleaseHold", GENERATE),
    Method::new("moored.v1.Residency/Plan", GENERATE).takes(Requests::Large),
    Method::new("moored.v1.Residency/GetStatus", OBSERVE).spare(),
    Method::new("moored.v1.Residency/WatchStatus", OBSERVE),
    Method::new("moored.v1.Residency/Trim", ADMINISTER),
    Method::new("moored.v1.Residency/Reserve", ADMINISTER).announces("reserve"),
    Method::new("moored.v1.Residency/ReleaseReservation", ADMINISTER),
    Method::new("moored.v1.Residency/Recycle", ADMINISTER),
    Method::new("moored.v1.Server/GetServerInfo", OBSERVE),
    Method::public("grpc.health.v1.Health/Check").spare(),
    Method::public("grpc.health.v1.Health/Watch").endless(),
    Method::public("grpc.health.v1.Health/List"),
    Method::public("grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    Method::public("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
];

/// A method that does not exist, or has no row. It is refused after the check of the token, and only to whom all else is allowed it is said
/// that it does not exist.
const UNKNOWN: Method = Method::new("", ADMINISTER);

/// The method at a path without its first slash.
pub(crate) fn method_at(path: &str) -> &'static Method {
    METHODS
        .iter()
        .find(|method| method.path == path)
        .unwrap_or(&UNKNOWN)
}

/// All methods.
#[cfg(test)]
pub(crate) fn methods() -> impl Iterator<Item = &'static Method> {
    METHODS.iter()
}

/// A call that was let in, in the extensions of its request.
#[derive(Clone, Debug)]
pub(crate) struct Admitted {
    pub(crate) method: &'static Method,
    /// Whether its caller has shown a token, or none is needed.
    pub(crate) is_known: bool,
    /// Whose token it carries; `None` where none is needed.
    pub(crate) holder: Option<Arc<Holder>>,
}

/// Capabilities of requests' fields, which no method has alone.
const OF_FIELDS: [&str; 8] = [
    "image_to_image",
    "preview",
    "quantization",
    "adapters",
    "mask",
    "end_image",
    "references",
    "controlnet",
];

/// The capabilities of this build, as `GetServerInfo` lists them.
pub(crate) fn capabilities() -> impl Iterator<Item = &'static str> {
    METHODS
        .iter()
        .filter_map(|method| method.capability)
        .chain(OF_FIELDS)
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
    fn every_method_has_a_row_with_the_size_of_its_requests() {
        let files = FileDescriptorSet::decode(v1::DESCRIPTORS).unwrap().file;
        let ours = || files.iter().filter(|file| file.package() == "moored.v1");
        let messages: BTreeMap<String, DescriptorProto> = ours()
            .flat_map(|file| &file.message_type)
            .map(|message| (format!(".moored.v1.{}", message.name()), message.clone()))
            .collect();
        let mut rows: BTreeSet<&str> = METHODS.iter().map(|method| method.path).collect();
        assert_eq!(rows.len(), METHODS.len(), "a method has two rows");
        for service in ours().flat_map(|file| &file.service) {
            for method in &service.method {
                let path = format!("moored.v1.{}/{}", service.name(), method.name());
                assert!(rows.remove(path.as_str()), "{path} has no row");
                let row = method_at(&path);
                let is_large = has_bytes(method.input_type(), &messages, &mut BTreeSet::new());
                let is_session = row.requests == Requests::Session;
                assert!(
                    is_session || is_large != (row.requests == Requests::Small),
                    "{path}"
                );
                assert!(matches!(row.needs, Needs::Role(_)), "{path} has no role");
            }
        }
        assert_eq!(
            method_at("moored.v1.Residency/New").needs,
            ADMINISTER,
            "one without a row"
        );
        let others = ["grpc.health.v1.", "grpc.reflection."];
        let is_other = |path: &&str| others.iter().any(|package| path.starts_with(package));
        assert!(rows.iter().all(is_other), "{rows:?}");
        let spare = METHODS
            .iter()
            .filter(|method| method.is_spare)
            .map(|method| method.path);
        let spare: Vec<&str> = spare.collect();
        let looks_or_cancels = [
            "moored.v1.Jobs/List",
            "moored.v1.Jobs/Cancel",
            "moored.v1.Residency/GetStatus",
            "grpc.health.v1.Health/Check",
        ];
        assert_eq!(spare, looks_or_cancels);
    }
}
