use super::*;
use crate::edits::{Edit, edited};

fn with(toml: &str) -> Result<Config, Mistakes> {
    let mut layers = Layers::new();
    let path = std::path::Path::new("moored.toml");
    layers.add_file(path, toml).map_err(Mistakes::one)?;
    Config::extract(layers)
}

/// The mistakes of flags as `--set` takes them.
fn mistakes_of(flags: &[(&str, &str)]) -> String {
    let flag = |(name, value): &(&str, &str)| ((*name).to_owned(), Some(value.parse().unwrap()));
    match Config::load(None, flags.iter().map(flag).collect()) {
        Ok(_) => String::new(),
        Err(mistakes) => mistakes.to_string(),
    }
}

#[test]
fn the_embedded_defaults_are_valid_and_every_setting_is_read() {
    let config = with("").unwrap();
    assert_eq!(config.service.listen.port(), 50051);
    assert_eq!(config.cards.headroom, Bytes::mib(256));
    assert_eq!(config.queue.keep_alive, None);
    let unload = config.queue.unload_when_idle;
    assert_eq!(
        unload.after(false),
        None,
        "only a desktop's other programs want the memory"
    );
    assert_eq!(unload.after(true), Some(Duration::from_secs(600)));
    for (text, time) in [("", None), ("2m", Some(Duration::from_secs(120)))] {
        let config = with(&format!("queue.unload_when_idle = '{text}'")).unwrap();
        assert_eq!(config.queue.unload_when_idle.after(true), time, "{text:?}");
    }
    assert!(
        config.sources.iter().all(|setting| setting.source == "default"),
        "{:?}",
        config.sources
    );
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let wrong = "service.drain = 'soon'\nqueue.max_jobs = 0\ncards.policy = 'greedy'\nqueue.colour = 'red'\n";
    let told = with(wrong).unwrap_err().to_string();
    for part in [
        "4 errors",
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
fn meaningless_settings_are_refused_with_a_remedy() {
    for (wrong, says) in [
        (
            "cards.headroom = '99999999999999999999TiB'",
            "64.0 TiB is the most",
        ),
        ("cards.headroom = '999PiB'", "64.0 TiB is the most"),
        ("limits.uploads = '999PiB'", "64.0 TiB is the most"),
        ("quantization.keep_limit = '15EiB'", "is the most"),
        ("service.max_message = '32TiB'", "4.0 GiB is the most"),
        ("limits.results = '0'", "the least that is of use"),
        ("queue.overtaking_bound = -1", "-1 is less than 0"),
        ("queue.overtaking_bound = 5000000000", "is too large"),
        ("queue.stall_limit = '0s'", "1s is the least"),
        ("queue.stall_limit = '1ns'", "is 1ns; 1s is the least"),
        ("queue.stall_floor = '1ns'", "1s is the least"),
        ("queue.cancel_limit = '1ms'", "1s is the least"),
        ("queue.latent_ttl = '0s'", "1s is the least"),
        ("limits.handshake = '1us'", "100ms is the least"),
        ("limits.unread = '1us'", "100ms is the least"),
        ("service.drain = '99999999999999999999y'", "is not a time"),
        ("service.drain = '500000000000y'", "longer than a hundred years"),
        ("queue.keep_alive = '300y'", "longer than a hundred years"),
        ("queue.unload_when_idle = '300y'", "longer than a hundred years"),
        (
            "models.settings.'a/b'.keep_alive = '300y'",
            "longer than a hundred years",
        ),
        ("models.settings.'a/b'.steps = 0", "steps of \"a/b\" is 0"),
        (
            "models.settings.'a/b'.steps = 100000",
            "steps of \"a/b\" is 100000",
        ),
        (
            "models.settings.'a/b'.guidance = nan",
            "guidance of \"a/b\" is NaN",
        ),
        ("models.settings.'a/b'.guidance = -1", "0 to 1000 is expected"),
        (
            "models.settings.'a/b'.width = 100",
            "width of \"a/b\" is 100; a multiple of 16",
        ),
        ("models.settings.'a/b'.height = 100000", "16 to 4096"),
        (
            "models.settings.'a/b'.max_sequence_length = 0",
            "max_sequence_length of",
        ),
        ("client.name = 'session-7'", "as the holders of sessions do"),
        ("log.filter = '[[['", "no filter such as"),
        ("log.filter = 'engine=loud'", "no filter such as"),
        ("client.endpoint = 'ftp://x'", "write http://HOST:PORT"),
        ("client.endpoint = 'http://'", "write http://HOST:PORT"),
        ("client.endpoint = ''", "write http://HOST:PORT"),
        ("client.name = \"a\\u001b[31m\"", "control characters"),
        ("service.state = \"\\u0000\"", "NUL"),
        ("service.token_file = \"a\\u0000\"", "NUL"),
        ("models.folders = [\"\\u0000\"]", "NUL"),
        ("models.paths.'a/b' = \"\\u0000\"", "NUL"),
        ("hub.cache = \"\\u0000\"", "NUL"),
        ("queue = 1", "queue (moored.toml): is a table"),
        ("models.paths = 1", "models.paths (moored.toml): is a table"),
        ("queue.max_jobs.x = 1", "is a setting, and has no others in it"),
        ("'' = 1", "there is no such setting"),
        ("[nope]", "there is no such table"),
        ("[querue]", "no such table; queue is one"),
        ("queue.max_jbs = 3", "no such setting; queue.max_jobs is one"),
        ("service.max_message = '0'", "the least that is of use"),
        ("hub.endpoint = 'mirror.example'", "as in https://mirror.example"),
    ] {
        let told = with(wrong).unwrap_err().to_string();
        assert!(
            told.contains(says) && told.contains("has an error"),
            "{wrong}: {told}"
        );
    }
}

#[test]
fn a_value_in_place_of_a_table_is_one_error() {
    for (name, says) in [
        (
            "queue",
            "queue (flag): is a table, and has no value itself: name a setting in it such as queue.",
        ),
        (
            "queue..max_jobs",
            "queue..max_jobs (flag): there is no such setting; queue.max_jobs is one",
        ),
        ("queue.", "queue. (flag): there is no such setting"),
        ("", "names no setting; write --set NAME=VALUE"),
        (".", "there is no such setting"),
        (
            "queue.max_jobs.more",
            "queue.max_jobs (flag): is a setting, and has no others in it",
        ),
    ] {
        let told = mistakes_of(&[(name, "1")]);
        assert!(
            told.contains("an error:") && told.contains(says),
            "{name:?}: {told}"
        );
    }
    let told = mistakes_of(&[("queue", "1"), ("queue.max_jobs", "0"), ("cards", "{headroom=1}")]);
    assert!(
        told.contains("2 errors") && told.contains("0 is less than 1"),
        "{told}"
    );
}

#[test]
fn a_configuration_that_is_no_regular_file_or_has_no_end_is_refused_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let sparse = folder.path().join("sparse.toml");
    std::fs::File::create(&sparse).unwrap().set_len(60 << 30).unwrap();
    for (path, says) in [
        (pipe, "no regular file"),
        ("/dev/zero".into(), "no regular file"),
        (folder.path().to_owned(), "no regular file"),
        (sparse, "the most that is read"),
        (folder.path().join("none"), "there is no configuration file"),
    ] {
        let told = Config::load(Some(path.clone()), Vec::new())
            .unwrap_err()
            .to_string();
        assert!(
            told.contains("an error:") && told.contains(says),
            "{}: {told}",
            path.display()
        );
    }
}

#[test]
fn more_headroom_than_a_card_has_is_refused() {
    let cards = with("cards.headroom = '8GiB'").unwrap().cards;
    let told = cards.check_headroom(&card("sim:8GiB")).unwrap_err();
    assert!(told.contains("sim:0 has 8.0 GiB"), "{told}");
    assert_eq!(cards.check_headroom(&card("sim:9GiB")), Ok(()));
}

#[test]
fn a_file_that_is_no_toml_is_one_error_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("moored.toml");
    std::fs::write(&file, "[queue]\nmax_jobs = = 3\n").unwrap();
    let told = Config::load(Some(file), Vec::new()).unwrap_err().to_string();
    assert!(told.contains("has an error") && told.contains("line 2"), "{told}");
    assert_eq!(told.matches("max_jobs").count(), 1, "{told}");
}

#[test]
fn a_leading_tilde_is_a_home_in_every_path() {
    let home = std::env::var("HOME").unwrap();
    let config = with(
        "models.folders = ['~/models']\nmodels.adapters = '~'\nmodels.paths = { 'me/a' = '~/a' }\nhub.cache = '~/hub'\n\
         service.state = '~/state'\nclient.ca_file = '~/ca'\nquantization.keep_folder = '~/kept'",
    )
    .unwrap();
    let under = |name: &str| PathBuf::from(&home).join(name);
    assert_eq!(config.models.folders, [under("models")]);
    assert_eq!(config.models.adapters, [PathBuf::from(&home)]);
    assert_eq!(config.models.paths["me/a"], under("a"));
    assert_eq!(config.hub.cache, under("hub"));
    assert_eq!(config.service.state, under("state"));
    assert_eq!(config.client.ca_file, Some(under("ca")));
    assert_eq!(config.quantization.keep_folder, Some(under("kept")));
}

#[test]
fn impossible_limits_are_mistakes() {
    let wrong = "limits.upload_idle = '0s'\nlimits.unread = 'soon'\nlimits.uploads_per_client = '1MiB'";
    let told = with(wrong).unwrap_err().to_string();
    for part in [
        "3 errors",
        "limits.upload_idle",
        "limits.unread",
        "service.max_message",
    ] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
}

#[test]
fn mistakes_of_all_layers_are_reported_together() {
    let flags: Flags = vec![
        ("queue.max_jobs".to_owned(), None),
        ("cards.policy".to_owned(), Some("greedy".into())),
        ("queue.colour".to_owned(), Some("red".into())),
    ];
    let told = Config::load(Some("no/such/file".into()), flags)
        .unwrap_err()
        .to_string();
    for part in [
        "4 errors",
        "no/such/file",
        "--set queue.max_jobs=VALUE",
        "greedy",
        "queue.colour",
    ] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
}

#[test]
fn the_certificate_of_the_service_is_its_own_or_a_named_one_with_its_key() {
    assert_eq!(with("").unwrap().service.certificates, None);
    let own = with("service.own_certificate = true\nservice.state = '/s'").unwrap();
    let own = own.service.certificates.unwrap();
    assert_eq!(own.key, PathBuf::from("/s").join(access::OWN_KEY));
    let named = "service.certificate = '/c'\nservice.certificate_key = '/k'\n";
    let read = with(&format!("{named}service.client_authorities = '/a'")).unwrap();
    assert_eq!(read.service.certificates.unwrap().files().len(), 3);
    for (wrong, named) in [
        ("service.certificate = '/c'", "service.certificate_key"),
        ("service.certificate_key = '/k'", "service.certificate"),
        ("service.client_authorities = '/a'", "service.own_certificate"),
        (
            &format!("{named}service.own_certificate = true"),
            "set one of the two",
        ),
        ("client.certificate = '/c'", "client.certificate_key"),
        ("client.fingerprint = 'ab'", "sha256:"),
    ] {
        let told = with(wrong).unwrap_err().to_string();
        assert!(told.contains(named), "{told}");
    }
}

#[test]
fn what_is_set_beside_an_endpoint_is_not_used_for_another() {
    let client = |file: &str, flags: &[(&str, &str)]| {
        let mut layers = Layers::new();
        layers
            .add_file(std::path::Path::new("moored.toml"), file)
            .unwrap();
        let flag = |(name, value): &(&str, &str)| (format!("client.{name}"), Some(value.parse().unwrap()));
        layers.add_flags(flags.iter().map(flag).collect());
        Config::extract(layers).unwrap().client
    };
    let file = format!(
        "[client]\nendpoint = 'https://box'\ntoken_file = '/t'\nfingerprint = '{}'\ncertificate = '/c'\ncertificate_key = '/k'",
        "0".repeat(64)
    );
    let has = |client: &ClientSettings| {
        (
            client.token_file.is_some(),
            client.fingerprint.is_some(),
            client.certificate.is_some(),
        )
    };
    assert_eq!(has(&client(&file, &[])), (true, true, true));
    assert_eq!(
        has(&client(&file, &[("endpoint", "https://BOX:443")])),
        (true, true, true)
    );
    for other in [
        "http://box:443",
        "https://box:444",
        "https://box.example",
        "nothing else",
    ] {
        let flags = [("endpoint", other)];
        let mut layers = Layers::new();
        layers
            .add_file(std::path::Path::new("moored.toml"), &file)
            .unwrap();
        layers.add_flags(vec![("client.endpoint".to_owned(), Some(other.into()))]);
        match Config::extract(layers) {
            Ok(config) => assert_eq!(has(&config.client), (false, false, false), "{flags:?}"),
            Err(_) => assert_eq!(other, "nothing else"),
        }
    }
    for flags in [
        [("endpoint", "https://other"), ("token_file", "/other")],
        [("token_file", "/other"), ("endpoint", "https://other")],
    ] {
        assert_eq!(
            has(&client(&file, &flags)),
            (true, false, false),
            "flags are one layer"
        );
    }
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
    let flags: Flags = vec![("service.listen".to_owned(), Some("127.0.0.1:7".into()))];
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
fn the_name_of_a_flag_may_have_keys_in_quotes() {
    let load = |set: &str| {
        let (name, value) = name_and_value(set);
        let value = value.map(|value| value.parse().unwrap());
        Config::load(None, vec![(name.to_owned(), value)])
    };
    for set in [
        "models.settings.\"me/z-1.5\".steps=7",
        "models.settings.'me/z-1.5'.steps=7",
        "'models'.\"settings\".\"me/z-1.5\".'steps'=7",
    ] {
        let config = load(set).unwrap();
        assert_eq!(config.models.settings["me/z-1.5"].steps, Some(7), "{set}");
    }
    let config = load("models.settings.\"a=b\".steps=7").unwrap();
    assert_eq!(config.models.settings["a=b"].steps, Some(7));
    assert_eq!(load("client.name=it's").unwrap().client.name, "it's");
    for wrong in [
        "models.settings.\"a.steps=7",
        "models.settings.\"a\"b.steps=7",
        "models.settings.\"\".steps=7",
        "\"queue\".\"nope\"=7",
    ] {
        let told = load(wrong).unwrap_err().to_string();
        assert!(told.contains("no such setting"), "{wrong}: {told}");
    }
}

#[test]
fn model_settings_are_tables_keyed_by_model_id() {
    let config = with("[models.settings.\"a/b\"]\nsteps = 3\n[models.paths]\n\"a/b\" = \"/x\"").unwrap();
    assert_eq!(config.models.settings["a/b"].steps, Some(3));
    assert_eq!(config.models.settings["a/b"].keep_alive, None);
    let keep_alive = |text: &str| {
        let config = with(&format!("[models.settings.\"a/b\"]\nkeep_alive = \"{text}\""));
        config.map(|config| config.models.settings["a/b"].keep_alive)
    };
    assert_eq!(keep_alive("10m").unwrap(), Some(Some(Duration::from_secs(600))));
    assert_eq!(keep_alive("").unwrap(), Some(None));
    assert!(
        keep_alive("long")
            .unwrap_err()
            .to_string()
            .contains("write a time")
    );
    let told = with("[models.settings.\"a/b\"]\nstepz = 3")
        .unwrap_err()
        .to_string();
    assert!(told.contains("stepz"), "{told}");
}

#[test]
fn a_card_that_is_named_twice_is_a_mistake() {
    let told = with("cards.devices = ['sim:1GiB', 'sim:2GiB']")
        .unwrap_err()
        .to_string();
    assert!(told.contains("sim:0 twice"), "{told}");
    assert!(with("cards.devices = ['sim:1GiB', 'sim:2GiB,index=1']").is_ok());
}

fn card(device: &str) -> CardDescription {
    device.parse::<DeviceSpec>().unwrap().describe().unwrap()
}

#[test]
fn a_profile_depends_on_the_card_unless_it_is_set() {
    let automatic = with("").unwrap().cards;
    assert_eq!(automatic.profile_of(&card("sim:8GiB")), ProfileName::Constrained);
    assert_eq!(automatic.profile_of(&card("sim:24GiB")), ProfileName::Balanced);
    assert_eq!(automatic.profile_of(&card("sim:80GiB")), ProfileName::Inference);
    assert_eq!(automatic.profile_of(&card("cpu:1GiB")), ProfileName::Balanced);
    let set = with("cards.profile = 'quantization-heavy'").unwrap().cards;
    assert_eq!(set.profile_of(&card("sim:8GiB")), ProfileName::QuantizationHeavy);
    let told = with("cards.profile = 'turbo'").unwrap_err().to_string();
    assert!(
        told.contains("auto, inference, balanced, constrained, quantization-heavy"),
        "{told}"
    );
}

#[test]
fn a_setting_overrides_the_profile() {
    let small = card("sim:8GiB");
    let by_profile = with("cards.profile = 'constrained'").unwrap().cards;
    assert_eq!(by_profile.memory_of(&small).slack_limit, Bytes::mib(64));
    assert_eq!(by_profile.policy_on([&small]), Some(Policy::Exclusive));
    let set = with("cards.profile = 'constrained'\ncards.policy = 'shared'\ncards.slack_limit = '1GiB'")
        .unwrap()
        .cards;
    let (memory, profile) = (set.memory_of(&small), by_profile.memory_of(&small));
    assert_eq!(memory.slack_limit, Bytes::gib(1));
    assert_eq!(
        MemoryProfile {
            slack_limit: Bytes::mib(64),
            ..memory
        },
        profile
    );
    assert_eq!(set.policy_on([&small]), Some(Policy::Shared));
}

#[test]
fn a_small_card_does_not_make_the_service_exclusive_by_itself() {
    let cards = with("").unwrap().cards;
    let (small, large) = (card("sim:8GiB"), card("sim:80GiB,index=1"));
    assert_eq!(cards.policy_on([&large]), None, "by the model");
    assert_eq!(
        cards.policy_on([&large, &small]),
        None,
        "what does not fit is streamed"
    );
}

#[test]
fn nvidia_cards_are_named_without_asking_the_driver() {
    let config = with("cards.devices = ['cuda:0', 'cuda:GPU-8f2c']").unwrap();
    assert_eq!(config.cards.devices.len(), 2);
    let told = with("cards.devices = ['cuda', 'cuda:0,dtype=f16']")
        .unwrap_err()
        .to_string();
    assert!(told.contains("cuda:0 twice"), "{told}");
    assert!(
        with("cards.devices = 'auto auto'")
            .unwrap_err()
            .to_string()
            .contains("twice")
    );
}

#[test]
fn each_setting_is_listed_once_with_its_effective_value() {
    let config = with("").unwrap();
    let value = |name: &str| {
        let found: Vec<_> = config
            .sources
            .iter()
            .filter(|setting| setting.name == name)
            .collect();
        assert_eq!(found.len(), 1, "{name}");
        found[0].value.clone()
    };
    assert_eq!(value("service.state"), config.service.state.display().to_string());
    assert_eq!(value("hub.cache"), config.hub.cache.display().to_string());
    assert_eq!(value("client.name"), config.client.name);
    assert_eq!(value("models.paths"), serde_json::json!({}));
    assert_eq!(value("queue.max_jobs"), 256);
}

#[test]
fn a_wrong_value_is_reported_once_without_type_names() {
    let told = with("queue.max_jobs = 'many'").unwrap_err().to_string();
    assert!(told.contains("\"many\" is not a whole number"), "{told}");
    let told = with("cards.devices = 'gpu0'").unwrap_err().to_string();
    assert!(
        told.contains("an error:") && !told.contains("names no card"),
        "{told}"
    );
}

#[test]
fn insecure_token_takes_1_for_true() {
    assert!(with("client.insecure_token = 1").unwrap().client.insecure_token);
    assert!(with("client.insecure_token = '1'").unwrap().client.insecure_token);
    assert!(!with("").unwrap().client.insecure_token);
    assert!(with("client.insecure_token = 'perhaps'").is_err());
}

#[test]
fn a_worker_gets_only_variables_that_its_libraries_read() {
    for needed in [
        "PATH",
        "LD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "RUST_BACKTRACE",
    ] {
        assert!(is_of_workers(needed), "{needed}");
    }
    for other in [
        "HF_TOKEN",
        "HUGGINGFACE_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "MOORED_TOKEN_FILE",
        "PATHS",
    ] {
        assert!(!is_of_workers(other), "{other}");
    }
}

/// Any configuration is read, or each mistake names a setting or a line.
#[test]
fn any_configuration_is_read_or_its_mistakes_are_named() {
    const VALUES: [&str; 18] = [
        "''",
        "'0'",
        "'0s'",
        "0",
        "-1",
        "9223372036854775807",
        "1e308",
        "nan",
        "true",
        "[]",
        "['', '/x']",
        "{}",
        "{ 'a/b' = '/x' }",
        "'99999999999999999999TiB'",
        "'~'",
        "'sim:24GiB'",
        "1970-01-01",
        r#""\u0000\U0001F600""#,
    ];
    let names: Vec<String> = with("")
        .unwrap()
        .sources
        .into_iter()
        .map(|setting| setting.name)
        .collect();
    bolero::check!()
        .with_iterations(300)
        .with_max_len(64)
        .with_type::<(Vec<(u8, u8)>, Vec<Edit>)>()
        .for_each(|(settings, edits)| {
            let settings = settings.iter().take(4).map(|&(name, value)| {
                let name = &names[usize::from(name) % names.len()];
                format!("{name} = {}\n", VALUES[usize::from(value) % VALUES.len()])
            });
            let text: String = settings.collect();
            let edited = edited(text.clone().into_bytes(), edits);
            for text in [text, String::from_utf8_lossy(&edited).into_owned()] {
                if let Err(mistakes) = with(&text) {
                    let told = mistakes.to_string();
                    assert!(told.contains("error") && told.len() > 30, "{text}: {told}");
                }
            }
        });
}

#[test]
fn paths_in_files_of_others_may_name_variables() {
    assert_eq!(
        expanded("$NO_SUCH_VARIABLE/loras"),
        PathBuf::from("$NO_SUCH_VARIABLE/loras")
    );
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(expanded("${CARGO_MANIFEST_DIR}/loras"), own.join("loras"));
    assert_eq!(expanded("~/loras"), home_folder().unwrap().join("loras"));
}
