//! Says what `moored --version` says; with the feature `cuda`, where the program finds NVIDIA's libraries.

fn main() {
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        for folder in cuda_libraries() {
            println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{folder}");
        }
    }
    tell_version();
}

/// What `moored --version` says. A debug build does not ask git: each commit would compile it anew.
fn tell_version() {
    println!("cargo:rerun-if-env-changed=MOORED_COMMIT");
    let profile = std::env::var("PROFILE").unwrap_or_default();
    let given = std::env::var("MOORED_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    let commit = given.or_else(|| {
        if profile == "release" {
            commit_by_git()
        } else {
            None
        }
    });
    let features = match std::env::var_os("CARGO_FEATURE_CUDA") {
        Some(_) => "cuda, cpu",
        None => "cpu (no CUDA: NVIDIA cards are not used)",
    };
    let commit = commit.unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=BUILD_OF_COMMIT={commit}");
    println!("cargo:rustc-env=BUILD_OF_FEATURES={features}");
    println!("cargo:rustc-env=BUILD_OF_PROFILE={profile}");
}

/// The commit with its date, and a note where files differ from it, if these are the sources of a git repository.
fn commit_by_git() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !text.is_empty()).then_some(text)
    };
    // What changes when a commit is made or another is checked out.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo:rerun-if-changed={log}");
    let commit = git(&["log", "-1", "--format=%h of %cs"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", "."]);
    Some(match changed {
        Some(_) => format!("{commit}, with changes"),
        None => commit,
    })
}

/// Where the CUDA runtime is looked for after LD_LIBRARY_PATH: as NVIDIA's wheels install it beside a program that pip has
/// installed, whichever Python that was, and where the toolkit puts it.
fn cuda_libraries() -> impl Iterator<Item = String> {
    let pythons = (10..=14).flat_map(|minor| {
        // The second is Debian's, outside of virtual environments.
        ["site-packages", "dist-packages"]
            .into_iter()
            .flat_map(move |packages| {
                // CUDA's own, and both forms of cuDNN, which is loaded when it is there.
                ["cu13", "cudnn", "cudnn_jit"]
                    .map(|of| format!("$ORIGIN/../lib/python3.{minor}/{packages}/nvidia/{of}/lib"))
            })
    });
    pythons.chain(["/usr/local/cuda/lib64".to_owned()])
}
