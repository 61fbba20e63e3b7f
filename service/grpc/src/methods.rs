//! The gRPC methods, a row for each.

use access::Role;
use transport::{Method, Needs, Requests};

const OBSERVE: Needs = Needs::Role(Role::Observe);
const GENERATE: Needs = Needs::Role(Role::Generate);
const ADMINISTER: Needs = Needs::Role(Role::Administer);

/// Every method, ours and those of health and reflection. A test holds it to the descriptors.
#[rustfmt::skip] // a line each
pub(crate) const METHODS: &[Method] = &[
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

    fn method_at(path: &str) -> &'static Method {
        METHODS.iter().find(|method| method.path == path).unwrap()
    }

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
