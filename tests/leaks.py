"""Detection of secrets in text, in any of the forms that Python would print."""

import base64

from corn.noise import Secret


def shows(secret: Secret, text: str) -> bool:
    value = secret.reveal()
    forms = (value.hex(), repr(value)[2:-1], base64.b64encode(value).decode(), str(list(value)))
    return any(form in text for form in forms)
