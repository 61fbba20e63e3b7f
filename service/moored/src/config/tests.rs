use super::*;

fn with(toml: &str) -> Result<Config, Mistakes> {
    Config::extract(
        Figment::new()
            .merge(Toml::string(DEFAULTS))
            .merge(Toml::string(toml)),
    )
}

#[test]
fn the_embedded_defaults_are_valid_and_every_setting_is_read() {
    let config = with("").unwrap();
    assert_eq!(config.service.listen.port(), 50051);
    assert_eq!(config.cards.headroom, Bytes::mib(256));
    assert_eq!(config.queue.keep_alive, None);
    assert!(
        config.sources.iter().all(|setting| setting.source == "default"),
        "{:?}",
        config.sources
    );
}

#[test]
fn all_mistakes_are_told_at_once() {
    let wrong = "service.drain = 'soon'\nqueue.max_jobs = 0\ncards.policy = 'greedy'\nqueue.colour = 'red'\n";
    let told = with(wrong).unwrap_err().to_string();
    for part in [
        "4 mistake(s)",
        "service.drain",
        "soon",
        "queue.max_jobs",
        "greedy",
        "exclusive",
        "queue.colour",
    ] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
}

#[test]
fn beyond_loopback_needs_a_token() {
    let told = with("service.listen = '0.0.0.0:50051'").unwrap_err().to_string();
    assert!(told.contains("token"), "{told}");
    assert!(with("service.listen = '0.0.0.0:50051'\nservice.token_file = 'token'").is_ok());
}

#[test]
fn sizes_times_and_lists_become_types() {
    let config =
        with("cards.devices = ['sim:24GiB', 'cpu']\nqueue.keep_alive = '2m'\ncards.headroom = '1GiB'")
            .unwrap();
    assert_eq!(config.cards.devices.len(), 2);
    assert_eq!(config.queue.keep_alive, Some(Duration::from_secs(120)));
    assert_eq!(config.cards.headroom, Bytes::gib(1));
}

#[test]
fn a_flag_wins_and_is_named_as_the_source() {
    let flags: Flags = vec![("service.listen".to_owned(), "127.0.0.1:7".into())];
    let config = Config::load(None, flags).unwrap();
    assert_eq!(config.service.listen.port(), 7);
    let setting = config
        .sources
        .iter()
        .find(|s| s.name == "service.listen")
        .unwrap();
    assert_eq!(setting.source, "flag");
}

#[test]
fn model_settings_are_a_table_of_the_users_own() {
    let config = with("[models.settings.\"a/b\"]\nsteps = 3\n[models.paths]\n\"a/b\" = \"/x\"").unwrap();
    assert_eq!(config.models.settings["a/b"].steps, Some(3));
    let told = with("[models.settings.\"a/b\"]\nstepz = 3")
        .unwrap_err()
        .to_string();
    assert!(told.contains("stepz"), "{told}");
}

#[test]
fn one_card_is_named_once() {
    let told = with("cards.devices = ['sim:1GiB', 'sim:2GiB']")
        .unwrap_err()
        .to_string();
    assert!(told.contains("sim:0 twice"), "{told}");
    assert!(with("cards.devices = ['sim:1GiB', 'sim:2GiB,index=1']").is_ok());
}
