//! `[hub]`, and the variables that programs which share a hub cache agree on.

use std::path::PathBuf;

use super::hub_settings::{HubSettings, HubToken};
use super::reader::{Reader, from_home};
use super::{home_folder, variable};

/// URL of the hub unless `HF_ENDPOINT` names another.
const ENDPOINT: &str = "https://huggingface.co";

/// `[hub]`.
pub(super) fn read(r: &mut Reader) -> HubSettings {
    let settings = settings_of(
        r.optional_text("hub.endpoint"),
        r.optional_path("hub.cache"),
        r.flag("hub.pull"),
        home_folder(),
        variable,
    );
    if !settings.has_url() {
        let written = settings.endpoint.trim_start_matches('/');
        let example = match written.contains("://") || written.contains(' ') {
            true => ENDPOINT.to_owned(),
            false => format!("https://{written}"),
        };
        r.mistake(
            "hub.endpoint",
            match written.contains('@') || written.contains('?') {
                true => format!(
                    "the hub's address, here or in HF_ENDPOINT, has a name, a password or a token in it, which clients would see: \
                     write it without, as in {ENDPOINT}, and put the token into HF_TOKEN"
                ),
                false => format!(
                    "the hub's address, here or in HF_ENDPOINT, is {:?}: write it with its scheme, as in {example}",
                    settings.endpoint
                ),
            },
        );
    }
    settings
}

fn settings_of(
    endpoint: Option<String>,
    cache: Option<PathBuf>,
    pull: bool,
    user: Option<PathBuf>,
    variable: impl Fn(&str) -> Option<String>,
) -> HubSettings {
    let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let path = |name: &str| Some(from_home(&variable(name)?, user.as_deref()));
    let is_on = |name: &str| {
        variable(name).is_some_and(|value| {
            ["1", "true", "yes", "on"].contains(&value.trim().to_ascii_lowercase().as_str())
        })
    };
    let own_folder = || {
        let users = path("XDG_CACHE_HOME").or_else(|| user.as_ref().map(|home| home.join(".cache")));
        users.unwrap_or_else(std::env::temp_dir).join("huggingface")
    };
    let home = path("HF_HOME").unwrap_or_else(own_folder);
    let endpoint = endpoint
        .or_else(|| variable("HF_ENDPOINT"))
        .unwrap_or_else(|| ENDPOINT.to_owned());
    let implicit = !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN");
    HubSettings {
        endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
        cache: cache
            .or_else(|| path("HF_HUB_CACHE"))
            .or_else(|| path("HUGGINGFACE_HUB_CACHE")) // its former name
            .unwrap_or_else(|| home.join("hub")),
        pull,
        token: HubToken::new(
            variable("HF_TOKEN")
                .or_else(|| variable("HUGGING_FACE_HUB_TOKEN"))
                .filter(|_| implicit),
            implicit.then(|| path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"))),
        ),
        offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> HubSettings {
        let value_of = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let home = value_of("HOME").map(PathBuf::from);
        settings_of(None, None, true, home, value_of)
    }

    #[test]
    fn the_cache_folder_is_that_of_other_programs() {
        let cache = |variables: &[(&str, &str)]| hub(variables).cache;
        assert_eq!(
            cache(&[("HOME", "/me")]),
            PathBuf::from("/me/.cache/huggingface/hub")
        );
        let mut variables = vec![("HOME", "/me"), ("XDG_CACHE_HOME", "/big")];
        assert_eq!(cache(&variables), PathBuf::from("/big/huggingface/hub"));
        variables.push(("HF_HOME", "/hf"));
        assert_eq!(cache(&variables), PathBuf::from("/hf/hub"));
        variables.push(("HF_HUB_CACHE", "/models"));
        assert_eq!(cache(&variables), PathBuf::from("/models"));
        let set = settings_of(None, Some("/set".into()), true, None, |_| {
            Some("/models".to_owned())
        });
        assert_eq!(set.cache, PathBuf::from("/set"));
    }

    #[test]
    fn a_leading_tilde_is_the_users_home() {
        let cache = |home: &str| hub(&[("HOME", "/me"), ("HF_HOME", home)]).cache;
        assert_eq!(cache("~/models"), PathBuf::from("/me/models/hub"));
        assert_eq!(cache("~"), PathBuf::from("/me/hub"));
        assert_eq!(cache("/a/~b"), PathBuf::from("/a/~b/hub"));
        let token = hub(&[("HOME", "/me"), ("HF_TOKEN_PATH", "~/token")]).token;
        assert_eq!(token.file(), Some(std::path::Path::new("/me/token")));
    }

    #[test]
    fn the_token_is_read_and_never_displayed() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        std::fs::write(folder.path().join("token"), "from-home\n").unwrap();
        std::fs::write(folder.path().join("other"), "from-path\n").unwrap();
        let other = folder.path().join("other");
        let mut variables = vec![("HF_HOME", home)];
        assert_eq!(hub(&variables).token.read().unwrap(), "from-home");
        variables.push(("HF_TOKEN_PATH", other.to_str().unwrap()));
        assert_eq!(hub(&variables).token.read().unwrap(), "from-path");
        variables.push(("HF_TOKEN", "given"));
        let given = hub(&variables);
        assert_eq!(given.token.read().unwrap(), "given");
        assert!(!format!("{given:?}").contains("given\""), "{given:?}");
        variables.push(("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"));
        assert_eq!(hub(&variables).token.read(), None);
    }

    #[test]
    fn the_endpoint_and_offline_mode_can_be_set() {
        assert_eq!(hub(&[]).endpoint, ENDPOINT);
        assert_eq!(
            hub(&[("HF_ENDPOINT", "http://mirror/")]).endpoint,
            "http://mirror"
        );
        assert!(!hub(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(hub(&[("HF_HUB_OFFLINE", "1")]).offline);
    }
}
