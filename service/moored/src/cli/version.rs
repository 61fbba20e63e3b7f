//! What this build is.

/// The version alone.
pub(super) const SHORT: &str = env!("CARGO_PKG_VERSION");
/// The version, the commit with its date, and what the build can drive.
pub(super) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("MOORED_BUILD_COMMIT"),
    "\nfeatures: ",
    env!("MOORED_BUILD_FEATURES"),
    "\nprofile: ",
    env!("MOORED_BUILD_PROFILE"),
);
