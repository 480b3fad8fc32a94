// Signs in by the code in the address of a link. The fragment is sent to nobody, and is cleared at once.
const form = document.getElementById("by-link");
const code = location.hash.slice(1);
if (code) {
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.code.value = code;
  form.submit();
}
