//! Version texts.

/// The version alone.
pub(super) const SHORT: &str = env!("CARGO_PKG_VERSION");
/// The version, the commit with its date, the features, and the profile.
pub(super) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("BUILD_OF_COMMIT"),
    "\nfeatures: ",
    env!("BUILD_OF_FEATURES"),
    "\nprofile: ",
    env!("BUILD_OF_PROFILE"),
);
