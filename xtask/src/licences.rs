//! The licences of everything that is built in, against the list in `deny.toml`.
//!
//! cargo-deny does the same and more; this is for machines that do not have it.

use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::MetadataCommand;
use serde::Deserialize;
use spdx::{Expression, LicenseReq, ParseMode};

#[derive(Debug, Deserialize)]
struct Deny {
    licenses: Licences,
}

#[derive(Debug, Deserialize)]
struct Licences {
    allow: Vec<String>,
}

/// All packages whose licence is not allowed, as sentences.
pub fn breaches(root: &Path) -> Result<Vec<String>> {
    let path = root.join("deny.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let deny: Deny = toml::from_str(&text).with_context(|| format!("{}", path.display()))?;
    let metadata =
        MetadataCommand::new().manifest_path(root.join("Cargo.toml")).exec().context("cargo metadata")?;
    let mut breaches = Vec::new();
    for package in &metadata.packages {
        let verdict = match &package.license {
            None => Err("no licence expression".to_owned()),
            Some(licence) => permitted(licence, &deny.licenses.allow)?,
        };
        if let Err(reason) = verdict {
            breaches.push(format!("{} {}: {reason}", package.name, package.version));
        }
    }
    Ok(breaches)
}

/// Whether the choice that a licence expression leaves can be made within the list.
fn permitted(licence: &str, allow: &[String]) -> Result<std::result::Result<(), String>> {
    let allowed: Vec<LicenseReq> = allow
        .iter()
        .map(|name| {
            let expression = Expression::parse(name).with_context(|| format!("deny.toml: licence {name}"))?;
            expression.requirements().next().map(|one| one.req.clone()).context("deny.toml: empty licence")
        })
        .collect::<Result<_>>()?;
    let expression = match Expression::parse_mode(licence, ParseMode::LAX) {
        Ok(expression) => expression,
        Err(error) => return Ok(Err(format!("licence {licence:?}: {error}"))),
    };
    Ok(match expression.evaluate_with_failures(|requirement| allowed.contains(requirement)) {
        Ok(()) => Ok(()),
        Err(_) => Err(format!("licence {licence:?} is not in the list of deny.toml")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_judged_by_the_choice_they_leave() {
        let allow = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception"] {
            assert_eq!(permitted(good, &allow).unwrap(), Ok(()), "{good}");
        }
        for bad in
            ["GPL-3.0-only", "MIT AND MPL-2.0", "Apache-2.0 WITH Classpath-exception-2.0", "unknown thing"]
        {
            assert!(permitted(bad, &allow).unwrap().is_err(), "{bad}");
        }
    }
}
