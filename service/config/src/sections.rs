//! The sections of the configuration, setting by setting.

use gpu::ProfileName;
use ops::Fp8Products;
use residency::{Bytes, Policy};

use super::reader::{Reader, in_home};
use super::{
    CardSettings, ClientSettings, LimitSettings, LogSettings, ModelSettings, QuantizationSettings,
    QueueSettings, ServiceSettings, state_folder, user_at_host,
};

/// A message of less has no room for a prompt and a small picture.
const LEAST_MESSAGE: Bytes = Bytes(64 << 10);

impl ServiceSettings {
    pub(super) fn read(r: &mut Reader) -> ServiceSettings {
        ServiceSettings {
            listen: r.parsed("service.listen", "an address such as 127.0.0.1:50051"),
            token_file: r.optional_path("service.token_file"),
            max_message: r.size_from("service.max_message", LEAST_MESSAGE),
            drain: r.duration("service.drain"),
            state: r.optional_path("service.state").unwrap_or_else(state_folder),
        }
    }
}

impl ModelSettings {
    pub(super) fn read(r: &mut Reader) -> ModelSettings {
        ModelSettings {
            folders: r.paths("models.folders"),
            adapters: r.paths("models.adapters"),
            comfyui: r.paths("models.comfyui"),
            default: r.optional_text("models.default"),
            paths: r
                .table::<String>("models.paths")
                .into_iter()
                .map(|(id, path)| (id, in_home(&path)))
                .collect(),
            preload: r.words("models.preload"),
            pinned: r.words("models.pinned"),
            settings: r.table("models.settings"),
        }
    }
}

impl CardSettings {
    pub(super) fn read(r: &mut Reader) -> CardSettings {
        CardSettings {
            devices: r.parsed_list("cards.devices"),
            profile: r.choice("cards.profile", &profiles()),
            policy: r.choice(
                "cards.policy",
                &[
                    ("", None),
                    ("shared", Some(Policy::Shared)),
                    ("exclusive", Some(Policy::Exclusive)),
                ],
            ),
            headroom: r.size("cards.headroom"),
            slack_limit: r.optional_size("cards.slack_limit"),
            release_threshold: r.optional_size("cards.release_threshold"),
            staging: r.optional_size("cards.staging"),
            staging_chunk: r.optional_size("cards.staging_chunk"),
            fp8_products: r.choice(
                "cards.fp8_products",
                &[
                    ("auto", Fp8Products::Auto),
                    ("never", Fp8Products::Never),
                    ("always", Fp8Products::Always),
                ],
            ),
        }
    }
}

impl QueueSettings {
    pub(super) fn read(r: &mut Reader) -> QueueSettings {
        QueueSettings {
            max_jobs: r.at_least("queue.max_jobs", 1),
            max_jobs_per_client: r.at_least("queue.max_jobs_per_client", 1),
            overtaking_bound: r.at_least("queue.overtaking_bound", 0),
            patience_after_eviction: r.duration("queue.patience_after_eviction"),
            patience_foreign: r.duration("queue.patience_foreign"),
            text_cache: r.size("queue.text_cache"),
            latents: r.size("queue.latents"),
            latent_ttl: r.duration("queue.latent_ttl"),
            keep_alive: r.optional_duration("queue.keep_alive"),
            unload_when_idle: r.unload_when_idle("queue.unload_when_idle"),
            stall_limit: r.some_time("queue.stall_limit"),
            stall_floor: r.some_time("queue.stall_floor"),
            cancel_limit: r.some_time("queue.cancel_limit"),
        }
    }
}

impl LimitSettings {
    pub(super) fn read(r: &mut Reader) -> LimitSettings {
        LimitSettings {
            connections: r.at_least("limits.connections", 1),
            connections_per_client: r.at_least("limits.connections_per_client", 1),
            handshake: r.some_time("limits.handshake"),
            calls: r.at_least("limits.calls", 1),
            calls_per_client: r.at_least("limits.calls_per_client", 1),
            uploads: r.size("limits.uploads"),
            uploads_per_client: r.size("limits.uploads_per_client"),
            upload_idle: r.some_time("limits.upload_idle"),
            results: r.size("limits.results"),
            results_per_client: r.size("limits.results_per_client"),
            unread: r.some_time("limits.unread"),
            media: r.size("limits.media"),
            media_per_client: r.size("limits.media_per_client"),
            holds_per_client: r.at_least("limits.holds_per_client", 1),
            reservations_per_client: r.at_least("limits.reservations_per_client", 1),
        }
    }
}

impl QuantizationSettings {
    pub(super) fn read(r: &mut Reader) -> QuantizationSettings {
        QuantizationSettings {
            keep_folder: r.optional_path("quantization.keep_folder"),
            keep_limit: r.size("quantization.keep_limit"),
        }
    }
}

impl ClientSettings {
    pub(super) fn read(r: &mut Reader) -> ClientSettings {
        ClientSettings {
            endpoint: r.text("client.endpoint"),
            token_file: r.optional_path("client.token_file"),
            ca_file: r.optional_path("client.ca_file"),
            insecure_token: r.switch("client.insecure_token"),
            name: r.optional_text("client.name").unwrap_or_else(user_at_host),
        }
    }
}

impl LogSettings {
    pub(super) fn read(r: &mut Reader) -> LogSettings {
        LogSettings {
            filter: r.optional_text("log.filter"),
            json: r.choice("log.format", &[("text", false), ("json", true)]),
        }
    }
}

/// The values of `cards.profile`.
fn profiles() -> Vec<(&'static str, Option<ProfileName>)> {
    let named = ProfileName::ALL.map(|name| (name.as_str(), Some(name)));
    std::iter::once(("auto", None)).chain(named).collect()
}
